"""Compile C sources into a shared library once per machine and cache it on disk.

The cache key covers everything that determines the result, so a cached library matches the
sources, the compiler and the CPU. A digest beside each library detects damaged files.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import struct
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from platformdirs import user_cache_path

from tinkex.logs import get_logger
from tinkex.system.atomic import SCRATCH_PREFIX, write_file_atomic

LOG = get_logger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
#: Optimized for this CPU, which is part of the cache key.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_TIMEOUT_SECONDS = 60
#: How many libraries the cache holds: one per installed version, compiler and CPU in use.
_MAX_CACHED = 4
#: Older scratch files were left by processes that were killed.
_MAX_SCRATCH_SECONDS = 3600


def load_library(source_dir: Path) -> ctypes.CDLL | None:
    """Load the library compiled from all C files of a directory, from the cache if possible.

    Returns None if no C compiler of this machine compiles it.
    """
    for compiler in filter(None, map(shutil.which, _COMPILERS)):
        try:
            key = _cache_key(compiler, source_dir)
            directory = _cache_directory()
            cached = None if directory is None else _load_cached(directory, key)
            return cached or _compile(compiler, source_dir, directory, key)
        except (OSError, subprocess.SubprocessError) as error:
            stderr = getattr(error, "stderr", None) or b""
            LOG.info("%s cannot compile the kernels: %s %s", compiler, error, stderr.decode()[:500])
    LOG.info("no C compiler compiles the kernels; torch runs everything, more slowly")
    return None


def _cache_key(compiler: str, source_dir: Path) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=_TIMEOUT_SECONDS
    )
    key = hashlib.sha256()
    for text in (*_FLAGS, compiler, _cpu_features(), str(struct.calcsize("P"))):
        key.update(text.encode() + b"\0")
    key.update(version.stdout + b"\0")
    for path in sorted(source_dir.glob("*.[ch]")):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return key.hexdigest()


def _cpu_features() -> str:
    """Instruction sets of the CPU, which `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return f"{platform.machine()} {features}"
    # Unknown: a home directory shared between machines must not mix their libraries.
    return f"{platform.machine()} {platform.node()}"


def _cache_directory() -> Path | None:
    """The user's kernel cache; None if it cannot be made or others could write to it."""
    path = user_cache_path("tinkex") / "kernels"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        LOG.info("no kernel cache: %s", error)
        return None
    is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) & 0o077 == 0
    if is_private and status.st_uid == os.getuid():
        return path
    LOG.info("no kernel cache: %s must be a directory of this user with mode 0700", path)
    return None


def _load_cached(directory: Path, key: str) -> ctypes.CDLL | None:
    path = directory / f"{key}.so"
    try:
        digest = path.with_suffix(".sha256").read_text()
        if _digest(path.read_bytes()) == digest:
            return ctypes.CDLL(str(path))
        LOG.info("%s is damaged; compiling the kernels again", path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        LOG.info("cannot load %s, compiling the kernels again: %s", path, error)
    return None


def _compile(compiler: str, source_dir: Path, directory: Path | None, key: str) -> ctypes.CDLL:
    scratch = TemporaryDirectory(prefix="tinkex-kernels-", ignore_cleanup_errors=True)
    with scratch as scratch_dir:
        path = Path(scratch_dir) / "kernels.so"
        sources = sorted(source_dir.glob("*.c"))
        subprocess.run(
            [compiler, *_FLAGS, "-I", source_dir, "-o", path, *sources, "-lm"],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )
        # The library stays mapped after its file is removed.
        library = ctypes.CDLL(str(path))
        if directory is not None:
            _store(directory, key, path.read_bytes())
        return library


def _store(directory: Path, key: str, content: bytes) -> None:
    """Add a library to the cache and remove old files; failing to is harmless."""
    path = directory / f"{key}.so"
    try:
        # A process that reads one new and one old file sees a wrong digest and compiles.
        write_file_atomic(path, content)
        write_file_atomic(path.with_suffix(".sha256"), _digest(content).encode())
        newest_first = sorted(directory.glob("*.so"), key=_modified, reverse=True)
        for old in newest_first[_MAX_CACHED:]:
            old.unlink(missing_ok=True)
            old.with_suffix(".sha256").unlink(missing_ok=True)
        for scratch in directory.glob(f"{SCRATCH_PREFIX}*"):
            if _modified(scratch) < _modified(path) - _MAX_SCRATCH_SECONDS:
                scratch.unlink(missing_ok=True)
    except OSError as error:
        LOG.info("cannot cache the kernels in %s: %s", directory, error)


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
