"""Inspects the weight files of a model folder: format, size, and whether they are complete.

Reads only headers, never tensors, and needs no tensor library.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, TypeGuard, cast

from tinkex.errors import ConfigError, RequestErrorCategory

#: Weight file names by format: a single file, or the index of several.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Bytes per element, by safetensors dtype name.
DTYPE_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100 << 20
_LFS_POINTER = b"version https://git-lfs"
_RETRY_HINT = "Copy or download the folder again."


class UnusableModel(ConfigError):
    """A base model cannot be used; this is the server's fault, not the client's."""

    category = RequestErrorCategory.Server


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Format, size and dtypes of a model's weight files."""

    format: Literal["safetensors", "pickle"]
    num_file_bytes: int
    num_parameters: int | None = None
    """Number of parameters; None for a pickle, which has no header."""
    dtypes: tuple[str, ...] = ()
    """The safetensors dtype names, most common first."""


def read_weight_files(folder: Path) -> WeightFiles:
    """Inspect a folder's weights; raises if they are missing, truncated or of unknown format."""
    files = _list_files(folder, *SAFETENSORS)
    if files:
        return _read_safetensors(files)
    files = _list_files(folder, *PICKLES)
    if files:
        for path in files:
            _check_pickle(path)
        return WeightFiles(format="pickle", num_file_bytes=_total_size(files))
    raise UnusableModel(_no_weights_message(folder))


def _list_files(folder: Path, single: str, index: str) -> dict[Path, set[str]]:
    """The files of one format, each with the tensors that the index lists for it."""
    if (folder / single).is_file():
        return {folder / single: set()}
    if not (folder / index).is_file():
        return {}
    table = read_json(folder / index).get("weight_map")
    if not isinstance(table, Mapping) or not table:
        raise UnusableModel(f"{folder / index} has no weight_map", hint=_RETRY_HINT)
    files: dict[Path, set[str]] = {}
    for tensor, name in table.items():
        files.setdefault(folder / str(name), set()).add(tensor)
    for path in files:
        if not path.is_file():
            raise UnusableModel(f"{path} is missing, but {index} lists it", hint=_RETRY_HINT)
    return files


def _read_safetensors(files: Mapping[Path, set[str]]) -> WeightFiles:
    counts: dict[str, int] = {}
    for path, listed in files.items():
        tensors = read_header(path)
        if missing := listed - tensors.keys():
            raise UnusableModel(
                f"{path} lacks {len(missing)} tensors, for example {min(missing)!r}",
                hint=_RETRY_HINT,
            )
        for entry in tensors.values():
            dtype = entry["dtype"]
            counts[dtype] = counts.get(dtype, 0) + math.prod(entry["shape"])
    return WeightFiles(
        format="safetensors",
        num_file_bytes=_total_size(files),
        num_parameters=sum(counts.values()),
        dtypes=tuple(sorted(counts, key=lambda dtype: -counts[dtype])),
    )


class TensorEntry(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the tensor entries of a safetensors file; raises if they do not match its length."""
    _check_not_lfs_pointer(path)
    header, num_data_bytes = _parse_header(path)
    problem = find_header_problem(header, num_data_bytes)
    if problem is not None:
        raise UnusableModel(f"{path} cannot be read: {problem}", hint=_RETRY_HINT)
    tensors = {name: entry for name, entry in header.items() if name != _METADATA}
    return cast("dict[str, TensorEntry]", tensors)  # as `find_header_problem` has checked


def _parse_header(path: Path) -> tuple[dict[str, object], int]:
    """The header of a safetensors file, and the number of bytes after it."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise UnusableModel(
                f"{path} is truncated or not a safetensors file: its header does not fit into "
                f"{num_bytes:,} bytes",
                hint=_RETRY_HINT,
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableModel(f"the header of {path} is not valid JSON", hint=_RETRY_HINT) from None
    if not isinstance(header, dict):
        raise UnusableModel(f"the header of {path} is not a JSON object", hint=_RETRY_HINT)
    return header, num_bytes - 8 - length


def describe_header_problem(path: Path) -> str | None:
    """Describe what is wrong with the header of a safetensors file, or return None."""
    try:
        header, num_data_bytes = _parse_header(path)
    except (UnusableModel, OSError):
        return None
    return find_header_problem(header, num_data_bytes)


def find_header_problem(header: Mapping[str, object], num_data_bytes: int) -> str | None:
    """Describe the first problem of a header, with the tensor's name; None if it is valid."""
    if not _is_metadata(header.get(_METADATA)):
        return f"its {_METADATA} is not a mapping of strings"
    ranges: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        if name == _METADATA:
            continue
        problem = _find_entry_problem(entry)
        if problem is not None:
            return f"tensor {name!r:.200} {problem}"
        assert isinstance(entry, dict)
        start, stop = entry["data_offsets"]
        ranges[name] = (start, stop)
    end = 0
    for name in sorted(ranges, key=lambda name: ranges[name]):
        start, stop = ranges[name]
        if start != end:
            return f"tensor {name!r:.200} begins at byte {start:,}, expected {end:,}"
        end = stop
    if end != num_data_bytes:
        return f"it has {num_data_bytes:,} bytes of tensors, but its header describes {end:,}"
    return None


def _find_entry_problem(entry: object) -> str | None:
    """Describe what is wrong with one tensor's entry; None if it is valid."""
    if not isinstance(entry, dict):
        return "has no dtype, shape and data_offsets"
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    size = DTYPE_SIZES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        return f"has the dtype {dtype!r:.40}, which is not one of {', '.join(DTYPE_SIZES)}"
    if not _is_int_list(shape):
        return f"has the shape {shape!r:.200}, which is not a list of sizes"
    if not _is_int_list(offsets) or len(offsets) != 2:
        return f"has data_offsets {offsets!r:.200}, expected two positions"
    num_bytes = size * math.prod(shape)
    if offsets[1] - offsets[0] != num_bytes:
        return (
            f"has {offsets[1] - offsets[0]:,} bytes, but {dtype} of shape {shape} needs "
            f"{num_bytes:,}"
        )
    return None


def _is_metadata(value: object) -> bool:
    if not isinstance(value, dict):
        return value is None
    return all(isinstance(item, str) for item in value.values())


def _is_int_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_pickle(path: Path) -> None:
    _check_not_lfs_pointer(path)
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive and not zipfile.is_zipfile(path):
        raise UnusableModel(f"{path} is truncated", hint=_RETRY_HINT)


def _check_not_lfs_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UnusableModel(
                f"{path} is a Git LFS pointer, not the weights",
                hint="Run `git lfs pull` in that folder.",
            )


def _no_weights_message(folder: Path) -> str:
    suffixes = {path.suffix for path in folder.iterdir()} & {".gguf", ".h5", ".msgpack", ".pt"}
    other = f"; {', '.join(sorted(suffixes))} files are not supported" if suffixes else ""
    expected = " or ".join((*SAFETENSORS, *PICKLES))
    return f"{folder} has no weights: expected {expected}{other}"


def _total_size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON file that holds an object."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnusableModel(f"{path} is not valid JSON: {error}", hint=_RETRY_HINT) from error
    if not isinstance(content, dict):
        raise UnusableModel(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def error_reason(error: BaseException) -> str:
    """An error's message on one line, or its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
