"""A GGUF file becomes a model folder: tensor by tensor, whole or not at all, the same numbers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.models.gguf.architectures import (
    ConversionPlan,
    TensorConversion,
    plan_conversion,
)
from tinkex.engine.models.gguf.reader import GgufFile, read_gguf
from tinkex.engine.models.gguf.tokenizer import to_json, tokenizer_files
from tinkex.engine.models.gguf.vocab import UnsupportedTokenizer, special_token_ids
from tinkex.engine.models.model_folder import ModelFolder, read_model_folder
from tinkex.engine.models.weight_files import UnusableModel, read_header, read_json
from tinkex.logs import get_logger
from tinkex.system.atomic import new_directory

LOG = get_logger(__name__)
#: Told how many bytes are written, of how many.
OnProgress = Callable[[int, int], None]
#: Where a folder says which file it was made from.
ORIGIN_NAME = "origin.json"
#: Raised when the same file would become another folder, so that old folders are made anew.
CONVERTER_VERSION = 1
WEIGHTS_NAME = "model.safetensors"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
#: How many numbers are unpacked at a time.
_CHUNK_NUMBERS = 1 << 20
#: Left free on a disk beside the folder.
_SPARE_BYTES = 64 << 20


def convert_gguf(
    source: Path,
    target: Path,
    *,
    files: Mapping[str, bytes] | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> ModelFolder:
    """Turn a GGUF file into a folder, with more `files` beside if there are; replaces the folder.

    What was converted before, from the same bytes, is taken as it is.
    """
    try:
        digest = file_sha256(source)
        if (found := find_converted(target, digest)) is not None:
            LOG.info("%s was converted before: %s", source, target)
            return found
        file = read_gguf(source)
        plan = plan_conversion(file)
        _check_disk_space(target, _total_bytes(plan))
        with new_directory(target) as scratch:
            written = _write_folder(scratch, file, plan, on_progress)
            _verify(scratch, plan, written)
            origin = _origin_json(source, digest, scratch, written)
            _write_files(scratch, {**(files or {}), ORIGIN_NAME: origin})
    except OSError as error:
        raise UnusableModel(
            f"{source} cannot be converted into {target}: {error.strerror or error}"
        ) from error
    return read_model_folder(target)


def find_converted(target: Path, digest: str) -> ModelFolder | None:
    """The folder that was made from a file of this digest; None if there is none, or no whole."""
    try:
        origin, folder = read_json(target / ORIGIN_NAME), read_model_folder(target)
        told = (origin.get("sha256"), origin.get("version"), origin.get("weights_bytes"))
        is_same = told == (digest, CONVERTER_VERSION, folder.weights.num_file_bytes)
        return folder if is_same else None
    except UnusableModel:
        return None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _origin_json(source: Path, digest: str, scratch: Path, written: str) -> bytes:
    about = {
        "file": source.name,
        "sha256": digest,
        "version": CONVERTER_VERSION,
        "weights_bytes": (scratch / WEIGHTS_NAME).stat().st_size,
        "weights_sha256": written,
    }
    return to_json(about)


def _total_bytes(plan: ConversionPlan) -> int:
    return sum(_converted_bytes(move) for move in plan.conversions)


def _converted_bytes(conversion: TensorConversion) -> int:
    return conversion.tensor.size * _DTYPE_SIZES[conversion.tensor.encoding.dtype]


def _check_disk_space(target: Path, num_bytes: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes + _SPARE_BYTES:
        raise UnusableModel(
            f"{target.parent} has {free / 1e9:.2f} GB free, and the converted model takes "
            f"{num_bytes / 1e9:.2f} GB",
            hint="Make room, or set TINKEX_HOME to a directory on another disk.",
        )


# --- what is written ------------------------------------------------------------------------


def _write_folder(
    scratch: Path, file: GgufFile, plan: ConversionPlan, on_progress: OnProgress
) -> str:
    """Write everything but the origin; returns the digest of the weights as they were made."""
    ends = special_token_ids(file)
    config = {**plan.config, **ends, "dtype": _commonest_dtype(plan)}
    _write_files(scratch, {"config.json": to_json(config), "generation_config.json": to_json(ends)})
    try:
        _write_files(scratch, tokenizer_files(file))
    except UnsupportedTokenizer as error:
        LOG.warning("%s: the folder has none, so put the model's own there", error.message)
    with (scratch / WEIGHTS_NAME).open("wb") as target, file.path.open("rb") as source:
        header = _safetensors_header(plan)
        made = hashlib.sha256(header)
        target.write(header)
        done, total = 0, _total_bytes(plan)
        for move in plan.conversions:
            for chunk in _tensor_chunks(source, file.path, move):
                made.update(chunk)
                target.write(chunk)
                done += len(chunk)
                on_progress(done, total)
    return made.hexdigest()


def _commonest_dtype(plan: ConversionPlan) -> str:
    counts: dict[str, int] = {}
    for move in plan.conversions:
        dtype = move.tensor.encoding.dtype
        counts[dtype] = counts.get(dtype, 0) + move.tensor.size
    return _DTYPE_NAMES[max(counts, key=lambda dtype: counts[dtype])]


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _safetensors_header(plan: ConversionPlan) -> bytes:
    """What a safetensors file begins with: the name, type, shape and place of each tensor."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for move in plan.conversions:
        start, end = end, end + _converted_bytes(move)
        shape, dtype = list(move.tensor.shape), move.tensor.encoding.dtype
        table[move.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensor_chunks(
    source: BinaryIO, path: Path, conversion: TensorConversion
) -> Iterator[memoryview]:
    """A tensor's numbers in order, some rows at a time."""
    stored, encoding = conversion.tensor, conversion.tensor.encoding
    source.seek(stored.offset)
    raw = np.frombuffer(source.read(stored.num_bytes), np.uint8)
    if raw.nbytes != stored.num_bytes:
        raise UnusableModel(f"{path} became shorter while it was read")
    # Rows are whole blocks, so that they change places while they are packed.
    num_rows = stored.shape[0] if len(stored.shape) > 1 or encoding.is_plain else 1
    rows = raw.reshape(num_rows, -1)
    if conversion.num_heads:
        rows = rows[row_order(num_rows, conversion.num_heads)]
    step = max(1, _CHUNK_NUMBERS * num_rows // stored.size)
    for start in range(0, num_rows, step):
        packed = np.ascontiguousarray(rows[start : start + step])
        numbers = encoding.decode(packed.reshape(-1, encoding.block_bytes))
        if not np.isfinite(numbers).all():
            raise UnusableModel(f"tensor {stored.name!r} of {path} has numbers that are not finite")
        yield (packed if encoding.is_plain else np.ascontiguousarray(numbers, "<f4")).data.cast("B")


def row_order(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Which row of the file comes where: the first of all pairs of a head, then the second."""
    pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
    return pairs.swapaxes(1, 2).ravel()


def _verify(scratch: Path, plan: ConversionPlan, written: str) -> None:
    """Read back what was written: every tensor, its shape, and every byte."""
    read_model_folder(scratch)
    weights = scratch / WEIGHTS_NAME
    found = {name: entry["shape"] for name, entry in read_header(weights).items()}
    expected = {move.name: list(move.tensor.shape) for move in plan.conversions}
    if found != expected or file_sha256(weights) != written:
        raise UnusableModel(f"the converted weights in {scratch} are not those of the file")
