"""The C kernels: compiled once per machine, cached on disk, with signatures as declared in `csrc`.

The cache key covers everything that determines the result, so a cached library matches the
sources, the compiler and the CPU. A digest beside each library detects damaged files. Does not
import torch.
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
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from platformdirs import user_cache_path

from tinkex.logs import get_logger
from tinkex.settings import read_environment
from tinkex.system.atomic import SCRATCH_PREFIX, write_file_atomic

LOG = get_logger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
#: Optimized for this CPU, which is part of the cache key.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_TIMEOUT_SECONDS = 60
_X86_MACHINES = ("x86_64", "AMD64", "i386", "i686")
#: Machine and node, where the instruction sets are unknown.
_UNKNOWN_WORDS = 2
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


# --- structs and signatures -----------------------------------------------------------------------


_SOURCE_DIR = Path(__file__).parent / "csrc"

#: Floats per SIMD vector (LANES in `lanes.h`).
LANES = 8
#: Linear layers of a decoder layer: QKV, attention output, gate and up, down.
LINEARS_PER_LAYER = 4

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ROWS = (_POINTER, _LONG)
_HEADS = (_POINTER, _LONG, _LONG)
_NORM = (_POINTER, _FLOAT)
_QK_ROTARY = (*(_POINTER,) * 3, _FLOAT, *(_POINTER,) * 2, *(_LONG,) * 4)
_VARLEN = (*_ROWS * 3, _POINTER, *(_LONG,) * 4, _FLOAT)

#: Argument types of kernels without a result; the number of threads comes last.
_KERNELS = {
    "packed_matmul": (*_ROWS, _POINTER, *_ROWS, *_ROWS, _LONG),
    "packed_matmul_transposed": (*_ROWS, _POINTER, *_ROWS, _LONG),
    "run_gemm_tasks": (_POINTER, _LONG),
    "add_rms_norm_forward": (_POINTER, _POINTER, *_NORM, _LONG, _LONG, _POINTER, _POINTER),
    "add_rms_norm_backward": (*(_POINTER,) * 3, *_NORM, _LONG, _LONG, _POINTER, _POINTER),
    "rotary_rows": (_POINTER, *(_LONG,) * 4, *_NORM, _POINTER, _POINTER),
    "rotary_forward": (*_QK_ROTARY, _POINTER, _POINTER),
    "rotary_backward": (*_QK_ROTARY, *(_POINTER,) * 5),
    "swiglu_rows": (_POINTER, _LONG, _LONG, _POINTER),
    "swiglu_forward": (_POINTER, _LONG, _LONG, _POINTER),
    "swiglu_backward": (_POINTER, _POINTER, _LONG, _LONG, _POINTER),
    "decode_attention": (
        *(*_HEADS * 3, *(_POINTER,) * 3, *(_LONG,) * 7),
        *(_FLOAT, _POINTER, _POINTER),
    ),
    "varlen_attention_forward": (*_VARLEN, *(_POINTER,) * 3, _LONG),
    "varlen_attention_backward": (*_VARLEN, *(_POINTER,) * 7, _LONG),
    "cross_entropy_forward_backward": (*(_POINTER,) * 3, _LONG, _LONG, _POINTER),
}
#: The same for kernels that return whether they could run.
_FALLIBLE_KERNELS = {
    "supports_dtype": (_LONG,),
    "packed_columns": (_POINTER, _POINTER, _LONG, _POINTER),
    "add_low_rank": (
        *(*_ROWS, _POINTER, _LONG, _LONG, _POINTER, _POINTER),
        *(*_ROWS, _LONG, _LONG),
    ),
    "decode_step": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, *(_POINTER,) * 6),
}


def is_supported_cpu(features: str) -> bool:
    """Whether the kernels are faster than torch: x86 needs AVX2, if its features are known."""
    words = features.split()
    return words[0] not in _X86_MACHINES or len(words) <= _UNKNOWN_WORDS or "avx2" in words


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Load the kernels, compiling them if needed; None if this machine cannot, or must not."""
    if not read_environment().kernels:
        LOG.info("TINKEX_KERNELS is off; torch runs everything, more slowly")
        return None
    if not is_supported_cpu(_cpu_features()):
        LOG.info("this CPU has no AVX2; torch runs everything")
        return None
    library = load_library(_SOURCE_DIR)
    if library is None:
        return None
    for kernels, result in ((_KERNELS, None), (_FALLIBLE_KERNELS, _INT)):
        for name, arguments in kernels.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, [*arguments, _INT]
    library.varlen_attention_scratch.restype = _LONG
    library.varlen_attention_scratch.argtypes = [_LONG, _LONG]
    return library


class GemmTask(ctypes.Structure):
    """One small matrix product of a batch: c = scale * a @ b, or c += it."""

    _fields_ = (
        *(("a", _POINTER), ("a_row", _LONG), ("a_input", _LONG)),
        *(("b", _POINTER), ("b_input", _LONG), ("b_output", _LONG)),
        *(("c", _POINTER), ("c_row", _LONG)),
        *(("rows", _LONG), ("inputs", _LONG), ("outputs", _LONG)),
        *(("scale", _FLOAT), ("accumulate", _INT)),
    )


class PackedWeightStruct(ctypes.Structure):
    """A packed weight; `dtype` is a number of `kernels.h`."""

    _fields_ = (("panels", _POINTER), ("dtype", _LONG), ("inputs", _LONG), ("outputs", _LONG))


# --- structs of decode_step.c, in the same field order --------------------------------------------


class LinearStruct(ctypes.Structure):
    """A frozen linear layer; the bias may be null."""

    _fields_ = (("weight", PackedWeightStruct), ("bias", _POINTER))


class NormStruct(ctypes.Structure):
    """An RMS norm; a null scale means no norm."""

    _fields_ = (("scale", _POINTER), ("eps_sum", _FLOAT))


class LayerStruct(ctypes.Structure):
    """A decoder layer: its norms, its linear layers and its attention options."""

    _fields_ = (
        ("input_norm", NormStruct),
        ("qk_norm", NormStruct),
        ("post_attention_norm", NormStruct),
        ("linears", LinearStruct * LINEARS_PER_LAYER),
        *(("scale", _FLOAT), ("window", _LONG)),
    )


class ModelStruct(ctypes.Structure):
    """A model whose layers all have the same shape."""

    _fields_ = (
        *(("layers", _POINTER), ("num_layers", _LONG)),
        ("final_norm", NormStruct),
        *((name, _LONG) for name in ("width", "query_heads", "kv_heads", "head_width", "inner")),
    )


class LoraPairStruct(ctypes.Structure):
    """An adapter's packed LoRA matrices for one merged linear layer; a null `down` means none."""

    _fields_ = (
        *(("down", _POINTER), ("ups", _POINTER), ("outputs", _POINTER)),
        *(("rank", _LONG), ("num", _LONG)),
    )


class AdapterSpanStruct(ctypes.Structure):
    """Consecutive rows of one adapter."""

    _fields_ = (("start", _LONG), ("stop", _LONG), ("pairs", _POINTER))


class KVBlockStruct(ctypes.Structure):
    """KV cache slots: keys and values by layer, and the number of tokens in each slot."""

    _fields_ = (
        *(("keys", _POINTER), ("values", _POINTER)),
        *(("lengths", _POINTER), ("capacity", _LONG)),
    )
