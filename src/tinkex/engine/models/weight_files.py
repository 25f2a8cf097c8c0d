"""The weights of a model folder as their headers tell: where they are, how large, whether whole.

No tensor is read, and no library for tensors is needed.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from tinkex.errors import ConfigError, RequestErrorCategory

#: Files that hold weights, by format: one file, or an index of several.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Bytes per number, by the name that safetensors has for a type.
_DTYPE_SIZES = {
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
    """A base model cannot be used; the fault is not that of whoever asks for it."""

    category = RequestErrorCategory.Server


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """What the files of weights say about themselves."""

    format: Literal["safetensors", "pickle"]
    num_file_bytes: int
    num_parameters: int | None = None
    """How many numbers there are; a pickle does not tell before it is read."""
    dtypes: tuple[str, ...] = ()
    """Their types as safetensors calls them, the commonest first."""


def read_weight_files(folder: Path) -> WeightFiles:
    """The weights of a folder; raises if they are missing, cut off, or in no known format."""
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
    """The files of one format, each with the tensors that the index promises in it."""
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
            raise UnusableModel(f"{path} is missing, which {index} names", hint=_RETRY_HINT)
    return files


def _read_safetensors(files: Mapping[Path, set[str]]) -> WeightFiles:
    counts: dict[str, int] = {}
    for path, promised in files.items():
        tensors = read_header(path)
        if lacking := promised - tensors.keys():
            raise UnusableModel(
                f"{path} lacks {len(lacking)} tensors, among them {min(lacking)!r}",
                hint=_RETRY_HINT,
            )
        for entry in tensors.values():
            dtype = str(entry["dtype"])
            counts[dtype] = counts.get(dtype, 0) + math.prod(entry["shape"])
    return WeightFiles(
        format="safetensors",
        num_file_bytes=_total_size(files),
        num_parameters=sum(counts.values()),
        dtypes=tuple(sorted(counts, key=lambda dtype: -counts[dtype])),
    )


def read_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name; raises unless the file is as long as they say."""
    _check_not_lfs_pointer(path)
    header, num_data_bytes = _parse_header(path)
    problem = find_header_problem(header, num_data_bytes)
    if problem is not None:
        raise UnusableModel(f"{path} cannot be read: {problem}", hint=_RETRY_HINT)
    return {name: entry for name, entry in header.items() if name != _METADATA}


def _parse_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and how many bytes follow it."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise UnusableModel(
                f"{path} is cut off or no safetensors file: {num_bytes:,} bytes do not hold its "
                "header",
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
    """What is wrong with the header of a safetensors file, if this can tell."""
    try:
        header, num_data_bytes = _parse_header(path)
    except (UnusableModel, OSError):
        return None
    return find_header_problem(header, num_data_bytes)


def find_header_problem(header: Mapping[str, Any], num_data_bytes: int) -> str | None:
    """The first thing that is wrong with a header, in words that name the tensor."""
    if not _is_metadata(header.get(_METADATA)):
        return f"its {_METADATA} is not a table of text"
    ends: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        if name == _METADATA:
            continue
        problem = _find_entry_problem(entry)
        if problem is not None:
            return f"tensor {name!r:.200} {problem}"
        start, stop = entry["data_offsets"]
        ends[name] = (start, stop)
    at = 0
    for name in sorted(ends, key=lambda name: ends[name]):
        start, stop = ends[name]
        if start != at:
            return f"tensor {name!r:.200} begins at byte {start:,}, expected {at:,}"
        at = stop
    if at != num_data_bytes:
        return f"it has {num_data_bytes:,} bytes of tensors where its header tells of {at:,}"
    return None


def _find_entry_problem(entry: Any) -> str | None:
    """What is wrong with the entry of one tensor."""
    if not isinstance(entry, dict):
        return "has no dtype, shape and data_offsets"
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    size = _DTYPE_SIZES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        return f"has the dtype {dtype!r:.40}, which is not one of {', '.join(_DTYPE_SIZES)}"
    if not _is_counts(shape):
        return f"has the shape {shape!r:.200}, which is not a list of counts"
    if not _is_counts(offsets) or len(offsets) != 2:
        return f"has data_offsets {offsets!r:.200}, expected two positions"
    num_bytes = size * math.prod(shape)
    if offsets[1] - offsets[0] != num_bytes:
        return (
            f"has {offsets[1] - offsets[0]:,} bytes, but {dtype} of shape {shape} takes "
            f"{num_bytes:,}"
        )
    return None


def _is_metadata(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    return all(isinstance(one, str) for one in value.values())


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in value)


def _check_pickle(path: Path) -> None:
    _check_not_lfs_pointer(path)
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive and not zipfile.is_zipfile(path):
        raise UnusableModel(f"{path} is cut off: its end is missing", hint=_RETRY_HINT)


def _check_not_lfs_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UnusableModel(
                f"{path} is a pointer of Git LFS, not the weights",
                hint="Run `git lfs pull` in that folder.",
            )


def _no_weights_message(folder: Path) -> str:
    found = sorted({path.suffix for path in folder.iterdir()} & {".gguf", ".h5", ".msgpack", ".pt"})
    other = f"; files of the type {', '.join(found)} are not read" if found else ""
    expected = " or ".join((*SAFETENSORS, *PICKLES))
    return f"{folder} has no weights: expected {expected}{other}"


def _total_size(files: Mapping[Path, Any]) -> int:
    return sum(path.stat().st_size for path in files)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnusableModel(f"{path} is no valid JSON: {error}", hint=_RETRY_HINT) from error
    if not isinstance(found, dict):
        raise UnusableModel(f"{path} holds a {type(found).__name__}, expected an object")
    return found
