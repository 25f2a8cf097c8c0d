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

from tinkex.engine.checkpoints.summaries import place
from tinkex.engine.models.weight_files import explain_header
from tinkex.errors import CheckpointError, TinkexError

#: Names of number formats in the files.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_BUFFER_BYTES = 1 << 20

TensorFile: TypeAlias = Any
"""An open file of the safetensors library, which has no types."""


class Entry(NamedTuple):
    """A tensor that a file will have."""

    name: str
    code: str
    """Its number format."""
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """How much room it takes."""
        return prod(self.shape) * code_bytes(self.code)


class Named(NamedTuple):
    """A tensor to write; `shape` is another one of the same numbers in the same order."""

    name: str
    tensor: Tensor
    shape: Sequence[int] | None = None

    @property
    def entry(self) -> Entry:
        """What the file says about it."""
        shape = self.tensor.shape if self.shape is None else self.shape
        return Entry(self.name, CODES[self.tensor.dtype], shape)


def code_bytes(code: str) -> int:
    """The bytes of one number."""
    bits = re.search(r"\d+", code)
    return int(bits[0]) // 8 if bits else 1


# --- writing -------------------------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Sequence[Named], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as they lie in memory; what is not contiguous is copied one at a time."""
    with new_tensor_file(path, [one.entry for one in tensors], metadata) as write:
        for one in tensors:
            write(one.tensor)


@contextmanager
def new_tensor_file(
    path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that takes the entries' numbers, in their order and in any pieces."""
    # transformers asks for the format's name.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    size = 0
    for entry in entries:
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
        yield lambda tensor: _write(file, tensor)
        written = file.tell() - 8 - len(text)
    assert written == size, f"{path.name} got {written} bytes of {size}"


def _write(file: Any, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().view(-1)
    file.write(flat.view(torch.uint8).numpy().data)


# --- reading -------------------------------------------------------------------------------------


def open_tensors(path: Path) -> TensorFile:
    """Open a file; CheckpointError if it is not whole."""
    try:
        # The library does not tell a missing file from a disk in trouble.
        with path.open("rb"):
            pass
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{place(path)} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{place(path)} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        reason = explain_header(path) or error
        raise CheckpointError(f"{place(path)} cannot be read: {reason}") from None


def read_into(
    path: Path,
    tensors: Sequence[Named],
    *,
    codes: Sequence[str] = ("F32",),
    error: type[TinkexError] = CheckpointError,
    counts: Callable[[str], bool] = lambda name: True,
    is_finite: bool = True,
) -> None:
    """Fill tensors from a file, which has to have just these; `error` is raised if it has not.

    `counts` says which of the file's tensors matter.
    """
    with open_tensors(path) as file:
        check_names(path, filter(counts, file.keys()), [one.name for one in tensors], error)
        for one in tensors:
            check_entry(path, entry_of(file, one.name), one.entry.shape, codes, error)
            found = file.get_tensor(one.name)
            if is_finite and not largest(found) < inf:
                raise error(f"{place(path)}: {one.name} has numbers that are not finite")
            one.tensor.copy_(found.view(one.tensor.shape))


def largest(tensor: Tensor) -> float:
    """The largest size of a number in a tensor; NaN if any is none."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    return float(torch.maximum(-low, high))


def check_names(
    path: Path, found: Iterable[str], wanted: Iterable[str], error: type[TinkexError]
) -> None:
    """Refuse a file that has not just these tensors, by the first in their order."""
    there, needed = set(found), set(wanted)
    if lacking := sorted(needed - there):
        raise error(f"{place(path)} has no tensor {lacking[0]!r}")
    if surplus := sorted(there - needed):
        raise error(
            f"{place(path)} has a tensor {surplus[0]!r}, which the adapter has no place for"
        )


def check_entry(
    path: Path, found: Entry, shape: Sequence[int], codes: Iterable[str], error: type[TinkexError]
) -> None:
    """Refuse a tensor of another shape or number format."""
    if found.code not in codes:
        raise error(f"{place(path)}: {found.name} is {found.code}, expected {' or '.join(codes)}")
    if tuple(found.shape) != tuple(shape):
        raise error(
            f"{place(path)}: {found.name} has shape {tuple(found.shape)}, expected {tuple(shape)}"
        )


def entry_of(file: TensorFile, name: str) -> Entry:
    """What an open file says about a tensor."""
    piece = file.get_slice(name)
    return Entry(name, piece.get_dtype(), piece.get_shape())
