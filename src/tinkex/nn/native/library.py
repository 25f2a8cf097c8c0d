"""The compiled kernels: made by this machine's C compiler when a process first needs them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tinkex.logs import get_logger

LOG = get_logger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
#: For this very processor: what is compiled never leaves the process.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wl,-Bsymbolic")
_SOURCES = ("products.c", "attention.c", "rows.c", "decoding.c")
_TIMEOUT_SECONDS = 60
_SOURCE_DIR = Path(__file__).parent

#: The kernels take so many numbers at a time.
LANES = 8

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class GemmTask(ctypes.Structure):
    """One of many small products, as the kernels have it."""

    _fields_ = (
        *(("a", _POINTER), ("a_row", _LONG), ("a_input", _LONG)),
        *(("b", _POINTER), ("b_input", _LONG), ("b_output", _LONG)),
        *(("c", _POINTER), ("c_row", _LONG)),
        *(("rows", _LONG), ("inputs", _LONG), ("outputs", _LONG)),
        *(("scale", ctypes.c_float), ("is_added", _INT)),
    )


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernels, compiled once in a process; None if this machine cannot, which is no error."""
    found = compile_library([_SOURCE_DIR / name for name in _SOURCES])
    return None if found is None else _declare_signatures(found)


def compile_library(sources: Sequence[Path]) -> ctypes.CDLL | None:
    """Kernels of these files, which may include `lanes.h`; None if this machine cannot."""
    compilers = [found for found in map(shutil.which, _COMPILERS) if found]
    for compiler in compilers:
        try:
            return _compile_with(compiler, sources)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            LOG.info("%s cannot compile the kernels: %s %s", compiler, error, said.decode()[:500])
    LOG.info("no C compiler compiles the kernels; torch computes alone, and more slowly")
    return None


def _compile_with(compiler: str, sources: Sequence[Path]) -> ctypes.CDLL:
    place = TemporaryDirectory(prefix="tinkex-kernels-", ignore_cleanup_errors=True)
    with place as directory:
        made = Path(directory) / "kernels.so"
        subprocess.run(
            [compiler, *_FLAGS, "-I", _SOURCE_DIR, "-o", made, *sources, "-lm"],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )
        # It stays in memory when the file is gone.
        return ctypes.CDLL(str(made))


def _declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """Say what the kernels take, in the order in which they are declared in C."""
    rows_of = (_POINTER, _LONG)
    library.multiply.restype = None
    library.multiply.argtypes = [*rows_of, _POINTER, *rows_of, *rows_of, _LONG, _LONG, _LONG, _INT]
    library.add_low_rank.restype = _INT
    library.add_low_rank.argtypes = [
        *rows_of,
        *(_POINTER, _LONG, _LONG, _POINTER, _POINTER),
        *rows_of,
        *(_LONG, _LONG, _INT),
    ]
    library.run_jobs.restype = None
    library.run_jobs.argtypes = [_POINTER, _LONG, _INT]
    heads_of = (_POINTER, _LONG, _LONG)
    library.attend.restype = None
    library.attend.argtypes = [
        *(*heads_of, *heads_of, *heads_of),
        *(_POINTER, _POINTER, _POINTER),
        *(_LONG,) * 7,
        *(ctypes.c_float, _POINTER, _POINTER, _INT),
    ]
    _declare_row_kernels(library)
    return library


def _declare_row_kernels(library: ctypes.CDLL) -> None:
    norm = (_POINTER, ctypes.c_float)
    library.norm_rows.restype = library.turn_rows.restype = library.gate_rows.restype = None
    library.norm_rows.argtypes = [_POINTER, *norm, _LONG, _LONG, _POINTER, _INT]
    library.turn_rows.argtypes = [_POINTER, *(_LONG,) * 4, *norm, _POINTER, _POINTER, _INT]
    library.gate_rows.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _INT]
    library.run_step.restype = _INT
    library.run_step.argtypes = [
        *(_POINTER, _POINTER, _LONG, _POINTER, _LONG),
        *(_POINTER,) * 6,
        _INT,
    ]
