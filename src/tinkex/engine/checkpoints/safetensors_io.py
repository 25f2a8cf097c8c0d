"""Safetensors files: written as a stream, so that nothing is copied or held, and read with care."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkex.engine.checkpoints.metadata import short_path
from tinkex.engine.models.weight_files import describe_header_problem
from tinkex.errors import CheckpointError, TinkexError

#: Names of number formats in the files.
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_BUFFER_BYTES = 1 << 20

SafetensorsFile: TypeAlias = Any
"""An open file of the safetensors library, which has no types."""


class TensorSpec(NamedTuple):
    """A tensor that a file will have."""

    name: str
    code: str
    """Its number format."""
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """How much room it takes."""
        return prod(self.shape) * dtype_bytes(self.code)


class NamedTensor(NamedTuple):
    """A tensor to write; `shape` is another one of the same numbers in the same order."""

    name: str
    tensor: Tensor
    shape: Sequence[int] | None = None

    @property
    def spec(self) -> TensorSpec:
        """What the file says about it."""
        shape = self.tensor.shape if self.shape is None else self.shape
        return TensorSpec(self.name, DTYPE_CODES[self.tensor.dtype], shape)


def dtype_bytes(code: str) -> int:
    """The bytes of one number."""
    bits = re.search(r"\d+", code)
    return int(bits[0]) // 8 if bits else 1


# --- writing -------------------------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Sequence[NamedTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as they lie in memory; what is not contiguous is copied one at a time."""
    with open_tensor_writer(path, [one.spec for one in tensors], metadata) as write:
        for one in tensors:
            write(one.tensor)


@contextmanager
def open_tensor_writer(
    path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that takes the entries' numbers, in their order and in any pieces."""
    # transformers asks for the format's name.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    size = 0
    for entry in specs:
        start, size = size, size + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.code,
            "shape": list(entry.shape),
            "data_offsets": [start, size],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield lambda tensor: _write_tensor_data(file, tensor)
        written = file.tell() - 8 - len(text)
    assert written == size, f"{path.name} got {written} bytes of {size}"


def _write_tensor_data(file: Any, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().view(-1)
    file.write(flat.view(torch.uint8).numpy().data)


# --- reading -------------------------------------------------------------------------------------


def open_tensors(path: Path) -> SafetensorsFile:
    """Open a file; CheckpointError if it is not whole."""
    try:
        # The library does not tell a missing file from a disk in trouble.
        with path.open("rb"):
            pass
        return safe_open(path, framework="pt")
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
    """Fill tensors from a file, which has to have just these; `error` is raised if it has not.

    `counts` says which of the file's tensors matter.
    """
    with open_tensors(path) as file:
        check_names(path, filter(is_relevant, file.keys()), [one.name for one in tensors], error)
        for one in tensors:
            check_tensor(path, read_tensor_spec(file, one.name), one.spec.shape, codes, error)
            found = file.get_tensor(one.name)
            if require_finite and not max_abs(found) < inf:
                raise error(f"{short_path(path)}: {one.name} has numbers that are not finite")
            one.tensor.copy_(found.view(one.tensor.shape))


def max_abs(tensor: Tensor) -> float:
    """The largest size of a number in a tensor; NaN if any is none."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    return float(torch.maximum(-low, high))


def check_names(
    path: Path, found: Iterable[str], expected: Iterable[str], error: type[TinkexError]
) -> None:
    """Refuse a file that has not just these tensors, by the first in their order."""
    there, needed = set(found), set(expected)
    if lacking := sorted(needed - there):
        raise error(f"{short_path(path)} has no tensor {lacking[0]!r}")
    if surplus := sorted(there - needed):
        raise error(
            f"{short_path(path)} has a tensor {surplus[0]!r}, which the adapter has no place for"
        )


def check_tensor(
    path: Path,
    found: TensorSpec,
    shape: Sequence[int],
    codes: Iterable[str],
    error: type[TinkexError],
) -> None:
    """Refuse a tensor of another shape or number format."""
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
    """What an open file says about a tensor."""
    piece = file.get_slice(name)
    return TensorSpec(name, piece.get_dtype(), piece.get_shape())
