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
_SOURCES = ("matmul.c", "attention_decode.c", "inference_kernels.c", "decode_step.c")
_TIMEOUT_SECONDS = 60
SOURCE_DIR = Path(__file__).parent / "csrc"

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
    found = compile_library([SOURCE_DIR / name for name in _SOURCES])
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
            [compiler, *_FLAGS, "-I", SOURCE_DIR, "-o", made, *sources, "-lm"],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )
        # It stays in memory when the file is gone.
        return ctypes.CDLL(str(made))


def _declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """Say what the kernels take, in the order in which they are declared in C."""
    rows_of = (_POINTER, _LONG)
    library.packed_matmul.restype = None
    library.packed_matmul.argtypes = [
        *rows_of,
        _POINTER,
        *rows_of,
        *rows_of,
        _LONG,
        _LONG,
        _LONG,
        _INT,
    ]
    library.add_low_rank.restype = _INT
    library.add_low_rank.argtypes = [
        *rows_of,
        *(_POINTER, _LONG, _LONG, _POINTER, _POINTER),
        *rows_of,
        *(_LONG, _LONG, _INT),
    ]
    library.run_gemm_tasks.restype = None
    library.run_gemm_tasks.argtypes = [_POINTER, _LONG, _INT]
    heads_of = (_POINTER, _LONG, _LONG)
    library.decode_attention.restype = None
    library.decode_attention.argtypes = [
        *(*heads_of, *heads_of, *heads_of),
        *(_POINTER, _POINTER, _POINTER),
        *(_LONG,) * 7,
        *(ctypes.c_float, _POINTER, _POINTER, _INT),
    ]
    _declare_row_kernels(library)
    return library


def _declare_row_kernels(library: ctypes.CDLL) -> None:
    norm = (_POINTER, ctypes.c_float)
    library.rms_norm_forward.restype = library.rotary_rows.restype = library.swiglu_rows.restype = (
        None
    )
    library.rms_norm_forward.argtypes = [_POINTER, *norm, _LONG, _LONG, _POINTER, _INT]
    library.rotary_rows.argtypes = [_POINTER, *(_LONG,) * 4, *norm, _POINTER, _POINTER, _INT]
    library.swiglu_rows.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _INT]
    library.decode_step.restype = _INT
    library.decode_step.argtypes = [
        *(_POINTER, _POINTER, _LONG, _POINTER, _LONG),
        *(_POINTER,) * 6,
        _INT,
    ]


_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
#: Linear maps of a layer: into attention, out of it, gate and up, down.
LINEARS_PER_LAYER = 4


class LinearStruct(ctypes.Structure):
    """A frozen linear map."""

    _fields_ = (("panels", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG))


class NormStruct(ctypes.Structure):
    """A norm; no scale means none."""

    _fields_ = (("scale", _POINTER), ("floor", ctypes.c_float))


class LayerStruct(ctypes.Structure):
    """A layer: norms before attention, of heads, and before the MLP; its maps; how it attends."""

    _fields_ = (
        *(("before", NormStruct), ("heads", NormStruct), ("between", NormStruct)),
        ("maps", LinearStruct * LINEARS_PER_LAYER),
        *(("scale", ctypes.c_float), ("window", _LONG)),
    )


class ModelStruct(ctypes.Structure):
    """A model of equal layers."""

    _fields_ = (
        *(
            ("embedding", _POINTER),
            ("layers", _POINTER),
            ("num_layers", _LONG),
            ("last", NormStruct),
        ),
        *((name, _LONG) for name in ("width", "query_heads", "key_heads", "head_width", "inner")),
    )


class LoraPairStruct(ctypes.Structure):
    """An adapter's part of a map; without a down there is none."""

    _fields_ = (
        *(("down", _POINTER), ("ups", _POINTER), ("outputs", _POINTER)),
        *(("rank", _LONG), ("num", _LONG)),
    )


class AdapterSpanStruct(ctypes.Structure):
    """Rows of one adapter."""

    _fields_ = (("start", _LONG), ("stop", _LONG), ("pairs", _POINTER))


class KVBlockStruct(ctypes.Structure):
    """Slots of samples: keys and values by layer, and how many tokens each slot holds."""

    _fields_ = (
        *(("keys", _POINTER), ("values", _POINTER)),
        *(("lengths", _POINTER), ("capacity", _LONG)),
    )
