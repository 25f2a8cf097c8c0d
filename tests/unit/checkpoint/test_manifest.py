"""Manifests: content and verification."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tinkex.checkpoint import manifest as manifest_module
from tinkex.checkpoint.manifest import (
    MANIFEST_NAME,
    check_manifest,
    read_manifest,
    write_manifest,
)
from tinkex.errors import CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    home = tmp_path / "run"
    (home / "sub").mkdir(parents=True)
    (home / "b.bin").write_bytes(b"bbb")
    (home / "sub" / "a.txt").write_bytes(b"")
    return home


def test_manifest_lists_every_file(directory: Path) -> None:
    manifest = write_manifest(directory)
    assert json.loads((directory / MANIFEST_NAME).read_bytes()) == {
        "files": {
            "b.bin": {"size": 3, "sha256": hashlib.sha256(b"bbb").hexdigest()},
            "sub/a.txt": {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        }
    }
    assert manifest.total_bytes == 3
    # The manifest has the same permissions as the files.
    assert (directory / MANIFEST_NAME).stat().st_mode == (directory / "b.bin").stat().st_mode
    assert read_manifest(directory) == manifest


def test_rewriting_changes_nothing(directory: Path) -> None:
    write_manifest(directory)
    before = (directory / MANIFEST_NAME).read_bytes()
    write_manifest(directory)
    assert (directory / MANIFEST_NAME).read_bytes() == before


def test_unchanged_directory_passes(directory: Path) -> None:
    manifest = write_manifest(directory)
    (directory / "unlisted").touch()
    assert check_manifest(directory) == manifest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "'b.bin' of 'run': No such file"),
        (b"bb", "'b.bin' of 'run' has 2 bytes, expected 3"),
        (b"bbx", "'b.bin' of 'run' is damaged: its sha256 is"),
    ],
)
def test_missing_or_changed_file_is_named(
    directory: Path, content: bytes | None, reason: str
) -> None:
    write_manifest(directory)
    (directory / "b.bin").unlink()
    if content is not None:
        (directory / "b.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        check_manifest(directory)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"files": {"a": {"size": 1}}}',
        b'{"files": {"a": {"size": "1", "sha256": ""}}}',
    ],
)
def test_invalid_manifest_is_refused(directory: Path, text: bytes) -> None:
    (directory / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest.json of 'run'"):
        read_manifest(directory)


@pytest.mark.parametrize("name", ["", ".", "..", "../b.bin", "/etc/passwd", "a/../b", "a//b"])
def test_names_outside_the_directory_are_refused(directory: Path, name: str) -> None:
    entry = {"size": 0, "sha256": ""}
    (directory / MANIFEST_NAME).write_text(json.dumps({"files": {name: entry}}))
    with pytest.raises(CheckpointError, match=r"manifest.json of 'run' lists"):
        read_manifest(directory)


def test_missing_manifest_and_symlink_are_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'run' has no manifest.json"):
        read_manifest(directory)
    (directory / "link").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="'link' of 'run' is a link"):
        write_manifest(directory)


def test_too_large_manifest_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(directory)
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"'run' has \d+ bytes, at most 100 are read"):
        read_manifest(directory)
