"""Tokenizer copies in the Hugging Face cache: added, updated, removed, never over Hub entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinkex.engine.models.hub_tokenizers import (
    MARKER,
    TokenizerRegistration,
    hub_cache_directory,
    register_tokenizer,
    unregister_tokenizer,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "llama", "secret": 1}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def snapshot(cache: Path, entry: str) -> Path:
    revision = (cache / entry / "refs" / "main").read_text()
    return cache / entry / "snapshots" / revision


def test_copy_has_hub_cache_layout(model: Path, cache: Path) -> None:
    assert register_tokenizer("alice/mine", model, cache) is TokenizerRegistration.DONE
    copied = snapshot(cache, "models--alice--mine")
    assert sorted(path.name for path in copied.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((copied / "config.json").read_text()) == {"model_type": "llama"}
    assert len(copied.name) == 40
    assert unregister_tokenizer("alice/mine", cache)
    assert list(cache.iterdir()) == []
    assert not unregister_tokenizer("alice/mine", cache)


def test_changed_tokenizer_replaces_copy(model: Path, cache: Path) -> None:
    register_tokenizer("mine", model, cache)
    before = snapshot(cache, "models--mine")
    stamp = before.stat().st_mtime_ns
    assert register_tokenizer("mine", model, cache) is TokenizerRegistration.DONE
    assert before.stat().st_mtime_ns == stamp
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    assert register_tokenizer("mine", model, cache) is TokenizerRegistration.DONE
    after = snapshot(cache, "models--mine")
    assert after != before and not before.exists()
    assert (after / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_hub_entries_are_never_changed(model: Path, cache: Path) -> None:
    real = cache / "models--alice--mine" / "snapshots" / "abc"
    real.mkdir(parents=True)
    (real / "tokenizer.json").write_text("real")
    assert register_tokenizer("alice/mine", model, cache) is TokenizerRegistration.FOREIGN
    assert not unregister_tokenizer("alice/mine", cache)
    assert (real / "tokenizer.json").read_text() == "real"


@pytest.mark.parametrize("name", ["a/b/c", "../x", "a--b", "", "a b", "/abs", "a/..", "-x"])
def test_invalid_hub_names_are_skipped(name: str, model: Path, cache: Path) -> None:
    assert register_tokenizer(name, model, cache) is TokenizerRegistration.BAD_NAME
    assert not unregister_tokenizer(name, cache)
    assert not cache.exists()


def test_model_without_tokenizer_is_skipped(tmp_path: Path, cache: Path) -> None:
    assert register_tokenizer("x", tmp_path, cache) is TokenizerRegistration.NO_TOKENIZER
    assert not cache.exists()


def test_unwritable_cache_is_not_an_error(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert register_tokenizer("x", model, blocked / "hub") is TokenizerRegistration.UNWRITABLE


def test_damaged_marker_still_marks_copy(model: Path, cache: Path) -> None:
    register_tokenizer("mine", model, cache)
    (cache / "models--mine" / MARKER).write_text("[]")
    assert register_tokenizer("mine", model, cache) is TokenizerRegistration.DONE


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_cache_directory_matches_huggingface_hub(
    environment: dict[str, str], expected: str
) -> None:
    assert str(hub_cache_directory(environment)) == expected
