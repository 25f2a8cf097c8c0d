"""The C kernels: their structs and signatures, as declared in `csrc`. Does not import torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from tinkex.nn.ops.kernel_cache import load_library

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
    "packed_matmul": (*_ROWS, _POINTER, *_ROWS, *_ROWS, *(_LONG,) * 3),
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
#: The same for kernels that return whether their memory could be allocated.
_ALLOCATING_KERNELS = {
    "add_low_rank": (
        *(*_ROWS, _POINTER, _LONG, _LONG, _POINTER, _POINTER),
        *(*_ROWS, _LONG, _LONG),
    ),
    "decode_step": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, *(_POINTER,) * 6),
}


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Load the kernels, compiling them if needed; None if this machine cannot."""
    library = load_library(_SOURCE_DIR)
    if library is None:
        return None
    for kernels, result in ((_KERNELS, None), (_ALLOCATING_KERNELS, _INT)):
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


# --- structs of decode_step.c, in the same field order --------------------------------------------


class LinearStruct(ctypes.Structure):
    """A frozen linear layer with a packed weight; the bias may be null."""

    _fields_ = (("panels", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG))


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
        *(("embedding", _POINTER), ("layers", _POINTER), ("num_layers", _LONG)),
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
