"""Streams tensors to safetensors files, and reads them with checks of names, shapes and dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkex.engine.checkpoints.metadata import short_path
from tinkex.engine.models.weight_files import describe_header_problem
from tinkex.errors import CheckpointError, TinkexError

#: Safetensors dtype names.
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_BUFFER_BYTES = 1 << 20


class TensorSlice(Protocol):
    """A tensor of an open file, which is read when it is indexed."""

    def get_dtype(self) -> str:
        """The safetensors dtype name."""
        ...

    def get_shape(self) -> list[int]:
        """The shape."""
        ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class SafetensorsFile(Protocol):
    """An open file of the safetensors library, which has no type annotations."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, traceback: object, /) -> object: ...

    def keys(self) -> list[str]:
        """The names of all tensors."""
        ...

    def metadata(self) -> dict[str, str] | None:
        """The strings of the header."""
        ...

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        ...

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor of which parts can be read."""
        ...


class TensorSpec(NamedTuple):
    """The header entry of a tensor."""

    name: str
    code: str
    """The safetensors dtype name."""
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * dtype_bytes(self.code)


class NamedTensor(NamedTuple):
    """A tensor to write or fill; `shape` overrides its shape in the file."""

    name: str
    tensor: Tensor
    shape: Sequence[int] | None = None

    @property
    def spec(self) -> TensorSpec:
        """Its header entry."""
        shape = self.tensor.shape if self.shape is None else self.shape
        return TensorSpec(self.name, DTYPE_CODES[self.tensor.dtype], shape)


def dtype_bytes(code: str) -> int:
    """The size of one element in bytes."""
    bits = re.search(r"\d+", code)
    return int(bits[0]) // 8 if bits else 1


# --- writing -------------------------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Sequence[NamedTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors without copies, except for those that are not contiguous."""
    with open_tensor_writer(path, [named.spec for named in tensors], metadata) as write:
        for named in tensors:
            write(named.tensor)


@contextmanager
def open_tensor_writer(
    path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that writes tensor data, in order and in chunks of any size."""
    # transformers requires the format entry.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    size = 0
    for spec in specs:
        start, size = size, size + spec.num_bytes
        header[spec.name] = {
            "dtype": spec.code,
            "shape": list(spec.shape),
            "data_offsets": [start, size],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield lambda tensor: _write_tensor_data(file, tensor)
        written = file.tell() - 8 - len(text)
    assert written == size, f"{path.name} has {written} bytes of {size}"


def _write_tensor_data(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().view(-1)
    file.write(flat.view(torch.uint8).numpy().data)


# --- reading -------------------------------------------------------------------------------------


def open_tensors(path: Path) -> SafetensorsFile:
    """Open a file; raises CheckpointError if it is missing or damaged."""
    try:
        # The library raises the same error for a missing file and for an I/O error.
        with path.open("rb"):
            pass
        file: SafetensorsFile = safe_open(path, framework="pt")
        return file
    except FileNotFoundError:
        raise CheckpointError(f"{short_path(path)} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{short_path(path)} cannot be read: {error.strerror or error}"
        ) from error
    except SafetensorError as error:
        reason = describe_header_problem(path) or error
        raise CheckpointError(f"{short_path(path)} cannot be read: {reason}") from None


def read_tensors_into(
    path: Path,
    tensors: Sequence[NamedTensor],
    *,
    codes: Sequence[str] = ("F32",),
    error: type[TinkexError] = CheckpointError,
    is_relevant: Callable[[str], bool] = lambda name: True,
    require_finite: bool = True,
) -> None:
    """Fill tensors from a file, which must have exactly these; raises `error` otherwise.

    Tensors of the file that are not `is_relevant` are ignored.
    """
    with open_tensors(path) as file:
        names = [target.name for target in tensors]
        check_names(path, filter(is_relevant, file.keys()), names, error)
        for target in tensors:
            spec = read_tensor_spec(file, target.name)
            check_tensor(path, spec, target.spec.shape, codes, error)
            stored = file.get_tensor(target.name)
            if require_finite and not max_abs(stored) < inf:
                raise error(f"{short_path(path)}: {target.name} has non-finite values")
            target.tensor.copy_(stored.view(target.tensor.shape))


def max_abs(tensor: Tensor) -> float:
    """The largest absolute value of a tensor; NaN if it has a NaN."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    return float(torch.maximum(-low, high))


def check_names(
    path: Path, found: Iterable[str], expected: Iterable[str], error: type[TinkexError]
) -> None:
    """Raise `error` for the first missing or unexpected tensor."""
    present, required = set(found), set(expected)
    if missing := sorted(required - present):
        raise error(f"{short_path(path)} has no tensor {missing[0]!r}")
    if extra := sorted(present - required):
        raise error(
            f"{short_path(path)} has a tensor {extra[0]!r}, which the adapter does not have"
        )


def check_tensor(
    path: Path,
    found: TensorSpec,
    shape: Sequence[int],
    codes: Iterable[str],
    error: type[TinkexError],
) -> None:
    """Raise `error` for a tensor of the wrong dtype or shape."""
    if found.code not in codes:
        raise error(
            f"{short_path(path)}: {found.name} is {found.code}, expected {' or '.join(codes)}"
        )
    if tuple(found.shape) != tuple(shape):
        raise error(
            f"{short_path(path)}: {found.name} has shape {tuple(found.shape)}, expected "
            f"{tuple(shape)}"
        )


def read_tensor_spec(file: SafetensorsFile, name: str) -> TensorSpec:
    """Read the header entry of a tensor."""
    stored = file.get_slice(name)
    return TensorSpec(name, stored.get_dtype(), stored.get_shape())
