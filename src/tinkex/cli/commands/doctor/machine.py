"""Checks of this machine: Python, disk, torch and its kernels, other libraries."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tinkex.cli.commands.doctor.findings import CHECK_SECONDS, CheckResult
from tinkex.cli.context import Context
from tinkex.cli.format import format_size
from tinkex.installation import install_command, missing_libraries
from tinkex.settings import package_version, read_environment

#: Python that tinkex is made for.
MIN_PYTHON = (3, 11)
#: With less, a checkpoint or a model may not fit; with very little, nothing does.
LOW_DISK_BYTES, FULL_DISK_BYTES = 5 * 1024**3, 100 * 1024**2
_TORCH_PROBE = "import torch; print(torch.__version__)"
_KERNELS_PROBE = (
    "from tinkex.nn.native.library import library; print('yes' if library() is not None else 'no')"
)


def check_python(context: Context) -> CheckResult:
    """The versions of tinkex and of Python."""
    found = f"tinkex {package_version()}, Python {platform.python_version()}, {platform.system()}"
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return CheckResult("fail", found, f"Install Python {wanted} or newer, and tinkex in it.")
    return CheckResult("ok", found)


def check_home(context: Context) -> CheckResult:
    """Whether the home can be written, and has room."""
    home = read_environment().home
    place = next(path for path in (home, *home.parents) if path.exists())
    if not _is_writable(place):
        advice = "Make it writable for this user, or set TINKEX_HOME to another directory."
        return CheckResult("fail", f"{place} cannot be written", advice)
    free = shutil.disk_usage(place).free
    found = f"{home} can be written, {format_size(free)} free"
    if free < FULL_DISK_BYTES:
        return CheckResult("fail", found, "Free some space: the disk is full.")
    if free < LOW_DISK_BYTES:
        return CheckResult("warn", found, "Free some space: models and checkpoints may not fit.")
    return CheckResult("ok", found)


def _is_writable(place: Path) -> bool:
    if not place.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


def check_torch(context: Context) -> CheckResult:
    """Whether torch is there and can be loaded."""
    if importlib.util.find_spec("torch") is None:
        return CheckResult("warn", "not installed; only a server on this machine needs it")
    code, said = run_python(_TORCH_PROBE)
    if code != 0:
        advice = f"Remove torch and add it again: {install_command('torch')}"
        return CheckResult("fail", f"cannot be loaded: {said}", advice)
    return CheckResult("ok", f"torch {said}")


def check_kernels(context: Context) -> CheckResult:
    """Whether the kernels for this processor can be compiled."""
    if importlib.util.find_spec("torch") is None:
        return CheckResult("ok", "not needed without torch")
    code, said = run_python(_KERNELS_PROBE)
    if code == 0 and said == "yes":
        return CheckResult("ok", "compiled for this processor")
    advice = "Install a C compiler (gcc or clang) to sample and train faster on the CPU."
    return CheckResult("warn", "cannot be compiled; torch's own are used", advice)


def check_transformers(context: Context) -> CheckResult:
    """Whether tokenizers can be loaded."""
    if importlib.util.find_spec("transformers") is None:
        return CheckResult(
            "warn",
            "not installed; prompts as text need it",
            f"Run: {install_command('text')}",
        )
    return CheckResult("ok", f"transformers {_library_version('transformers')}")


def check_server_libraries(context: Context) -> CheckResult:
    """Whether a server can be started on this machine."""
    if missing := missing_libraries("server", "torch"):
        advice = f"To serve models on this machine, run: {install_command('server', 'torch')}"
        return CheckResult("warn", f"{', '.join(missing)} not installed", advice)
    return CheckResult("ok", "a server can be started here")


def _library_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


def run_python(code: str, seconds: float = CHECK_SECONDS) -> tuple[int, str]:
    """The exit code and the last line of a Python that can be ended, whatever it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # A compiler that it started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -1, f"took longer than {seconds:g} seconds"
    return process.returncode, "".join(said.strip().splitlines()[-1:])
