"""Converts a GGUF file to a model folder: streamed tensor by tensor and written atomically."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.models.gguf.architectures import (
    ConversionPlan,
    TensorConversion,
    plan_conversion,
)
from tinkex.engine.models.gguf.reader import GgufFile, read_gguf
from tinkex.engine.models.gguf.tokenizer import (
    UnsupportedTokenizer,
    special_token_ids,
    to_json,
    tokenizer_files,
)
from tinkex.engine.models.model_folder import ModelFolder, read_model_folder
from tinkex.engine.models.weight_files import DTYPE_SIZES, UnusableModel, read_header, read_json
from tinkex.logs import get_logger
from tinkex.system.atomic import new_directory

LOG = get_logger(__name__)
#: Called with the bytes done and the total.
OnProgress = Callable[[int, int], None]
#: Records which file a folder was converted from.
ORIGIN_NAME = "origin.json"
#: Increased when the output for the same file changes, so that old folders are converted again.
CONVERTER_VERSION = 1
WEIGHTS_NAME = "model.safetensors"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: The number of elements that are dequantized at a time.
_CHUNK_NUMBERS = 1 << 20
#: Disk space that must remain free.
_SPARE_BYTES = 64 << 20


def convert_gguf(
    source: Path,
    target: Path,
    *,
    files: Mapping[str, bytes] | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> ModelFolder:
    """Convert a GGUF file to a folder, which is replaced; `files` are added to it.

    A folder that was already converted from the same bytes is kept.
    """
    try:
        digest = file_sha256(source)
        if (found := find_converted(target, digest)) is not None:
            LOG.info("%s is already converted: %s", source, target)
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
    """The complete folder converted from a file with this digest, or None."""
    try:
        origin, folder = read_json(target / ORIGIN_NAME), read_model_folder(target)
        recorded = (origin.get("sha256"), origin.get("version"), origin.get("weights_bytes"))
        is_same = recorded == (digest, CONVERTER_VERSION, folder.weights.num_file_bytes)
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
    return sum(_converted_bytes(conversion) for conversion in plan.conversions)


def _converted_bytes(conversion: TensorConversion) -> int:
    return conversion.tensor.size * DTYPE_SIZES[conversion.tensor.encoding.dtype]


def _check_disk_space(target: Path, num_bytes: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes + _SPARE_BYTES:
        raise UnusableModel(
            f"{target.parent} has {free / 1e9:.2f} GB free, but the converted model needs "
            f"{num_bytes / 1e9:.2f} GB",
            hint="Free space, or set TINKEX_HOME to a directory on another disk.",
        )


# --- writing --------------------------------------------------------------------------------


def _write_folder(
    scratch: Path, file: GgufFile, plan: ConversionPlan, on_progress: OnProgress
) -> str:
    """Write everything but the origin; returns the digest of the weights."""
    token_ids = special_token_ids(file)
    config = {**plan.config, **token_ids, "dtype": _commonest_dtype(plan)}
    _write_files(
        scratch, {"config.json": to_json(config), "generation_config.json": to_json(token_ids)}
    )
    try:
        _write_files(scratch, tokenizer_files(file))
    except UnsupportedTokenizer as error:
        LOG.warning("%s; add the tokenizer files of the model to the folder", error.message)
    with (scratch / WEIGHTS_NAME).open("wb") as target, file.path.open("rb") as source:
        header = _safetensors_header(plan)
        digest = hashlib.sha256(header)
        target.write(header)
        done, total = 0, _total_bytes(plan)
        for conversion in plan.conversions:
            for chunk in _tensor_chunks(source, file.path, conversion):
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                on_progress(done, total)
    return digest.hexdigest()


def _commonest_dtype(plan: ConversionPlan) -> str:
    counts: dict[str, int] = {}
    for conversion in plan.conversions:
        dtype = conversion.tensor.encoding.dtype
        counts[dtype] = counts.get(dtype, 0) + conversion.tensor.size
    return _DTYPE_NAMES[max(counts, key=lambda dtype: counts[dtype])]


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _safetensors_header(plan: ConversionPlan) -> bytes:
    """The header of a safetensors file: name, dtype, shape and offsets of each tensor."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for conversion in plan.conversions:
        start, end = end, end + _converted_bytes(conversion)
        shape, dtype = list(conversion.tensor.shape), conversion.tensor.encoding.dtype
        table[conversion.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensor_chunks(
    source: BinaryIO, path: Path, conversion: TensorConversion
) -> Iterator[memoryview]:
    """Yield a tensor's converted bytes, some rows at a time."""
    stored, encoding = conversion.tensor, conversion.tensor.encoding
    source.seek(stored.offset)
    raw = np.frombuffer(source.read(stored.num_bytes), np.uint8)
    if raw.nbytes != stored.num_bytes:
        raise UnusableModel(f"{path} was truncated while it was read")
    # Rows consist of whole blocks, so they can be reordered before dequantization.
    num_rows = stored.shape[0] if len(stored.shape) > 1 or encoding.is_plain else 1
    rows = raw.reshape(num_rows, -1)
    if conversion.num_heads:
        rows = rows[row_order(num_rows, conversion.num_heads)]
    step = max(1, _CHUNK_NUMBERS * num_rows // stored.size)
    for start in range(0, num_rows, step):
        packed = np.ascontiguousarray(rows[start : start + step])
        values = encoding.decode(packed.reshape(-1, encoding.block_bytes))
        if not np.isfinite(values).all():
            raise UnusableModel(f"tensor {stored.name!r} of {path} has non-finite values")
        yield (packed if encoding.is_plain else np.ascontiguousarray(values, "<f4")).data.cast("B")


def row_order(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """The row indices that undo RoPE interleaving: per head, all first halves, then all second."""
    pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
    return pairs.swapaxes(1, 2).ravel()


def _verify(scratch: Path, plan: ConversionPlan, written: str) -> None:
    """Read the output back and compare names, shapes and the digest."""
    read_model_folder(scratch)
    weights = scratch / WEIGHTS_NAME
    found = {name: entry["shape"] for name, entry in read_header(weights).items()}
    expected = {conversion.name: list(conversion.tensor.shape) for conversion in plan.conversions}
    if found != expected or file_sha256(weights) != written:
        raise UnusableModel(f"the converted weights in {scratch} do not match the file")
