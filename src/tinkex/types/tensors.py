"""Tensors of the API: float32 or int64, dense or CSR, stored as NumPy arrays.

NumPy and torch are imported when the first tensor is created.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias, TypeGuard

from tinkex.errors import InvalidInput

TensorDtype: TypeAlias = Literal["int64", "float32"]

if TYPE_CHECKING:
    import torch

    from tinkex.types import arrays
    from tinkex.types.arrays import Array, Indices
else:

    class _Late:
        """Imports arrays.py, and with it NumPy, at first use."""

        def __getattr__(self, name):
            function = getattr(importlib.import_module("tinkex.types.arrays"), name)
            # Cached, because an import in every method would cost more than the work.
            setattr(self, name, function)
            return function

    arrays = _Late()


class TensorData:
    """A tensor of numbers.

    With CSR indices, `array` holds only the listed values, row by row; all other cells have the
    `pad_value` of the conversion, and `shape` is the dense shape. NumPy arrays are shared with the
    caller unless their dtype must change.
    """

    __slots__ = ("_cols", "_crow", "_numpy", "dtype", "shape")

    dtype: TensorDtype
    shape: list[int]
    _numpy: Array
    _crow: Indices | None
    _cols: Indices | None

    def __init__(
        self,
        data: Sequence[object] | Array | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | Indices | None = None,
        sparse_col_indices: Sequence[int] | Indices | None = None,
    ) -> None:
        if dtype != "float32" and dtype != "int64":
            raise InvalidInput(f"TensorData dtype is {dtype!r}; expected 'int64' or 'float32'")
        array = arrays.as_array("data", data, dtype)
        sizes = array.shape if shape is None else arrays.check_shape(shape)
        crow = cols = None
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            crow = arrays.as_indices("sparse_crow_indices", sparse_crow_indices)
            cols = arrays.as_indices("sparse_col_indices", sparse_col_indices)
            array = array.reshape(-1)
            arrays.check_csr(array, sizes, crow, cols)
        else:
            array = arrays.reshape_checked(array, sizes)
        self._set_fields(array, dtype, list(sizes), crow, cols)

    def _set_fields(
        self,
        array: Array,
        dtype: TensorDtype,
        shape: list[int],
        crow: Indices | None = None,
        cols: Indices | None = None,
    ) -> Self:
        set_slot = object.__setattr__
        set_slot(self, "_numpy", array)
        set_slot(self, "dtype", dtype)
        set_slot(self, "shape", shape)
        set_slot(self, "_crow", crow)
        set_slot(self, "_cols", cols)
        return self

    @property
    def array(self) -> Array:
        """The numbers without a copy: the dense array, or the listed values of a CSR tensor."""
        return self._numpy

    @property
    def is_sparse(self) -> bool:
        """True for a CSR tensor."""
        return self._crow is not None

    @property
    def crow_array(self) -> Indices | None:
        """The CSR row pointers without a copy."""
        return self._crow

    @property
    def col_array(self) -> Indices | None:
        """The CSR column numbers without a copy."""
        return self._cols

    @property
    def nbytes(self) -> int:
        """The size of the numbers and the indices in bytes."""
        parts = (self._numpy, self._crow, self._cols)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def data(self) -> list[int] | list[float]:
        """The numbers as one flat list."""
        return self._numpy.ravel().tolist()

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """The CSR row pointers, one more than there are rows."""
        return None if self._crow is None else self._crow.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """The CSR column of every listed value."""
        return None if self._cols is None else self._cols.tolist()

    @classmethod
    def from_numpy(cls, array: Array) -> Self:
        """Wrap an array; floats become float32 and signed integers int64."""
        dtype = arrays.dtype_of(array)
        return cls.__new__(cls)._set_fields(
            arrays.as_array("data", array, dtype), dtype, list(array.shape)
        )

    @classmethod
    def from_numpy_sparse(cls, array: Array, pad_value: int = 0) -> Self:
        """Wrap an array; a 2-D one becomes CSR if that is smaller."""
        pad = arrays.check_pad(pad_value)
        parts = arrays.sparsify(array, pad) if array.ndim == 2 else None
        if parts is None:
            return cls.from_numpy(array)
        values, crow, cols = parts
        return cls(values, arrays.dtype_of(array), array.shape, crow, cols)

    @classmethod
    def from_list(cls, values: Sequence[object], dtype: TensorDtype | None, name: str) -> Self:
        """Convert a flat or nested list; its numbers determine the dtype if `dtype` is None.

        `name` names the list in errors.
        """
        array = (
            arrays.infer_array(name, values)
            if dtype is None
            else arrays.as_array(name, values, dtype)
        )
        return cls.__new__(cls)._set_fields(array, arrays.dtype_of(array), list(array.shape))

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Wrap a torch tensor; bfloat16 becomes float32, other devices are copied to the CPU."""
        return cls.from_numpy(_to_cpu_array(tensor))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """Like `from_numpy_sparse`, from a dense torch tensor."""
        return cls.from_numpy_sparse(_to_cpu_array(tensor), pad_value)

    def to_numpy(self, pad_value: int = 0) -> Array:
        """Return a dense, writable array; unlisted cells of a CSR tensor are `pad_value`."""
        if self._crow is not None and self._cols is not None:
            pad = arrays.check_pad(pad_value)
            return arrays.densify(self._numpy, self.shape, self._crow, self._cols, pad)
        return self._numpy if self._numpy.flags.writeable else self._numpy.copy()

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """Return a dense torch tensor; it shares memory with a dense, writable `array`."""
        try:
            import torch
        except ImportError as error:
            from tinkex.installation import install_command

            raise ImportError(f"to_torch needs PyTorch: {install_command('torch')}") from error
        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Return the dense tensor as nested lists."""
        numbers: list[Any] = self.to_numpy(pad_value).tolist()
        return numbers

    def find_not_finite(self) -> tuple[str, float] | None:
        """Return position and value of the first NaN or infinity, e.g. `("[3]", nan)`, or None."""
        return arrays.find_not_finite(self._numpy, self._crow, self._cols)

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form."""
        wire: dict[str, object] = {"data": self.data, "dtype": self.dtype, "shape": self.shape}
        if self._crow is not None:
            wire["sparse_crow_indices"] = self.sparse_crow_indices
            wire["sparse_col_indices"] = self.sparse_col_indices
        return wire

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """Build a tensor from its JSON form; null among floats means NaN."""
        if not isinstance(data, Mapping) or "dtype" not in data:
            raise InvalidInput(f"TensorData is read from an object with a dtype, got {data!r:.80}")
        numbers = data.get("data")
        if data["dtype"] == "float32" and isinstance(numbers, list) and None in numbers:
            numbers = [float("nan") if number is None else number for number in numbers]
        return cls(
            numbers,
            data["dtype"],
            data.get("shape"),
            data.get("sparse_crow_indices"),
            data.get("sparse_col_indices"),
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"TensorData is frozen; cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"TensorData is frozen; cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return (
            arrays.arrays_equal(self._numpy, other._numpy)
            and arrays.arrays_equal(self._crow, other._crow)
            and arrays.arrays_equal(self._cols, other._cols)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        layout = ", CSR" if self.is_sparse else ""
        return f"TensorData(dtype={self.dtype!r}, shape={self.shape}{layout})"

    def __reduce__(self) -> tuple[object, ...]:
        return (TensorData, (self._numpy, self.dtype, self.shape, self._crow, self._cols))


def is_torch_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a torch tensor, without importing torch."""
    torch_class = getattr(sys.modules.get("torch"), "Tensor", None)
    return torch_class is not None and isinstance(value, torch_class)


def is_numpy_array(value: object) -> TypeGuard[Array]:
    """Return whether a value is a NumPy array, without importing NumPy."""
    array_class = getattr(sys.modules.get("numpy"), "ndarray", None)
    return array_class is not None and isinstance(value, array_class)


def _to_cpu_array(tensor: torch.Tensor) -> Array:
    """Convert a tensor to an array, sharing memory if possible."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"from_torch takes a torch tensor, got {tensor!r:.80}")
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: Array = tensor.cpu().contiguous().numpy()
    return array


# --- headers of serialized tensors (dmel chunks) ---------------------------------------------
#: First byte of a tensor whose cells are all equal; the header follows.
_CONSTANT_MARKER = 254
_LAST_DTYPE = 7


def read_tensor_shape(data: bytes) -> tuple[int, ...]:
    """Return the shape in the header of a serialized tensor."""
    at = 1 if data[:1] == bytes([_CONSTANT_MARKER]) else 0
    if len(data) <= at:
        raise InvalidInput(f"a serialized tensor cannot end after {len(data)} bytes")
    if data[at] > _LAST_DTYPE:
        raise InvalidInput(f"a serialized tensor cannot have type {data[at]}")
    num_dims, at = _read_varint(data, at + 1)
    shape: list[int] = []
    for _ in range(num_dims):
        size, at = _read_varint(data, at)
        shape.append(size)
    return tuple(shape)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint; returns its value and end position."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise InvalidInput(f"a serialized tensor's header is cut off after {len(data)} bytes")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise InvalidInput(f"a serialized tensor's size runs over 64 bits, near byte {at}")
