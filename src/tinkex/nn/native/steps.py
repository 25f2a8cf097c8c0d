"""What the kernel of a whole step reads, as it is declared in C."""

from __future__ import annotations

import ctypes

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
