"""Synthetic model folders with valid headers and zero weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 256,
}
SHAPES = {"model.embed_tokens.weight": (10, 4), "model.norm.weight": (4,)}
#: The number of parameters of a folder.
NUM_PARAMETERS = 44


def safetensors(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "F32") -> bytes:
    """A safetensors file of zeros."""
    size = {"F32": 4, "BF16": 2}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + size * _product(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def _product(shape: tuple[int, ...]) -> int:
    number = 1
    for side in shape:
        number *= side
    return number


def write_folder(
    folder: Path, config: Mapping[str, Any] = CONFIG, files: Mapping[str, bytes] | None = None
) -> Path:
    """Write a model folder with one weight file, or with the given files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in (files or {"model.safetensors": safetensors()}).items():
        (folder / name).write_bytes(content)
    return folder


def write_shards(folder: Path) -> Path:
    """Write a model folder with two weight files."""
    names = list(SHAPES)
    index = {"weight_map": {names[0]: "a.safetensors", names[1]: "b.safetensors"}}
    return write_folder(
        folder,
        files={
            "model.safetensors.index.json": json.dumps(index).encode(),
            "a.safetensors": safetensors({names[0]: SHAPES[names[0]]}),
            "b.safetensors": safetensors({names[1]: SHAPES[names[1]]}),
        },
    )
