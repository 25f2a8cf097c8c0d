"""A stored checkpoint is hashed once; errors name the damaged checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkex.checkpoint import manifest as manifests
from tinkex.checkpoint.manifest import Manifest, VerifiedCheckpoints, check_manifest, write_manifest
from tinkex.errors import CheckpointError, RequestErrorCategory

NAME = "tinker://run/weights/first"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    directory = tmp_path / "stored"
    directory.mkdir()
    (directory / "weights").write_bytes(bytes(1000))
    (directory / "optimizer").write_bytes(bytes(2000))
    write_manifest(directory)
    return directory


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the directories that are hashed."""
    found: list[Path] = []

    def check(directory: Path) -> Manifest:
        found.append(directory)
        return check_manifest(directory)

    monkeypatch.setattr(manifests, "check_manifest", check)
    return found


def flip(path: Path) -> None:
    """Flip one bit and keep size and time, like a disk fault."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("file_name", ["weights", "optimizer", "manifest.json"])
def test_flipped_bit_is_detected_and_names_the_checkpoint(stored: Path, file_name: str) -> None:
    path = stored / file_name
    if file_name == "manifest.json":
        text = path.read_text()
        path.write_text(text.replace('"size": 1000', '"size": 1001'))
    else:
        flip(path)
    with pytest.raises(CheckpointError, match=f"checkpoint {NAME} is damaged") as raised:
        VerifiedCheckpoints().verify(stored, NAME)
    assert raised.value.category is RequestErrorCategory.Server


def test_files_are_hashed_once_until_they_change(stored: Path, hashed: list[Path]) -> None:
    checked = VerifiedCheckpoints()
    for _ in range(3):
        checked.verify(stored, NAME)
    assert hashed == [stored]
    (stored / "weights").write_bytes(bytes(1000))
    checked.verify(stored, NAME)
    assert hashed == [stored, stored]


def test_own_checkpoint_is_not_verified_again(stored: Path, hashed: list[Path]) -> None:
    checked = VerifiedCheckpoints()
    checked.mark_verified(stored)
    checked.verify(stored, NAME)
    assert hashed == []
    (stored / "optimizer").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes, expected 2000"):
        checked.verify(stored, NAME)


def test_number_of_remembered_checkpoints_is_bounded(tmp_path: Path, hashed: list[Path]) -> None:
    checked = VerifiedCheckpoints(max_verified=2)
    for number in (1, 2, 3, 1):
        directory = tmp_path / str(number)
        directory.mkdir(exist_ok=True)
        write_manifest(directory)
        checked.verify(directory, NAME)
    assert [path.name for path in hashed] == ["1", "2", "3", "1"]


def test_missing_file_and_missing_checkpoint_differ(stored: Path) -> None:
    (stored / "weights").unlink()
    with pytest.raises(CheckpointError, match="'weights': No such file"):
        VerifiedCheckpoints().verify(stored, NAME)
    with pytest.raises(CheckpointError, match="was deleted or has expired"):
        VerifiedCheckpoints().verify(stored / "absent", NAME)
