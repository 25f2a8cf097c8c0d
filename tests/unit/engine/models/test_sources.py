"""Names and locations of base models, from flags and the model list."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.memory_limits import can_fit, choose_evictions
from tinkex.engine.models.sources import (
    check_model_name,
    default_name,
    is_folder_location,
    is_gguf_location,
    merge_sources,
    model_folder_name,
    parse_source,
    read_model_list,
    resolve_location,
    write_model_list,
)
from tinkex.errors import ConfigError

NAMES = st.from_regex(r"[A-Za-z0-9_.+-]{1,20}(/[A-Za-z0-9_.+-]{1,20})?", fullmatch=True)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- flags --------------------------------------------------------------------------------------


def test_parse_name_and_folder(tmp_path: Path) -> None:
    assert parse_source("mine=./model") == ("mine", str(tmp_path / "model"))
    assert parse_source("org/mine=/data/model") == ("org/mine", "/data/model")
    assert parse_source("mine=~/model") == ("mine", str(Path.home() / "model"))


def test_parse_hub_id() -> None:
    assert parse_source("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert parse_source("small=Qwen/Qwen3-0.6B") == ("small", "Qwen/Qwen3-0.6B")


def test_folder_name_is_default_model_name(tmp_path: Path) -> None:
    assert parse_source("./some/model") == ("model", str(tmp_path / "some/model"))
    assert parse_source("/data/model/") == ("model", "/data/model")


def test_existing_folder_takes_precedence_over_hub(tmp_path: Path) -> None:
    assert not is_folder_location("org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert is_folder_location("org/name")
    assert parse_source("org/name") == ("org/name", str(tmp_path / "org/name"))


def test_gguf_is_detected_by_name_or_magic(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF and more")
    (tmp_path / "other").write_bytes(b"GG")
    (tmp_path / "folder.gguf").mkdir()
    assert [is_gguf_location(x) for x in ("blob", "./blob", "none.gguf", "/data/X.GGUF")] == [
        True
    ] * 4
    assert not any(
        is_gguf_location(x)
        for x in ("other", "none", "folder.gguf", "Qwen/Qwen3", "a\0b", "", "x" * 5000)
    )


def test_gguf_stem_is_default_model_name(tmp_path: Path) -> None:
    assert parse_source("small.Q4_0.gguf") == ("small.Q4_0", str(tmp_path / "small.Q4_0.gguf"))
    assert parse_source("mine=x.gguf") == ("mine", str(tmp_path / "x.gguf"))


@settings(deadline=None)
@given(NAMES, NAMES)
def test_folder_names_are_unique_and_safe(one: str, other: str) -> None:
    made = []
    for name in {one, other}:
        try:
            made.append(model_folder_name(name))
        except ConfigError:
            assert name.startswith(".")
    assert len(set(made)) == len(made)
    assert all(Path(name).name == name and name not in (".", "..") for name in made)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "/a", "a/", "a//b", "x" * 201, "a\n", "a=b"])
def test_invalid_model_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid model name"):
        check_model_name(name)


@pytest.mark.parametrize("text", ["=", "name=", "=place", ""])
def test_incomplete_source_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_source(text)


def test_flags_override_list_and_must_not_conflict() -> None:
    listed = {"a": "/one", "b": "/two"}
    assert merge_sources(listed, ["b=/three", "c=/four"]) == {
        "a": "/one",
        "b": "/three",
        "c": "/four",
    }
    assert merge_sources({}, ["c=/four", "c=/four"]) == {"c": "/four"}
    with pytest.raises(ConfigError, match="model 'c' is given twice: /four and /five"):
        merge_sources({}, ["c=/four", "c=/five"])


@given(NAMES)
def test_valid_names_round_trip_through_flags(name: str) -> None:
    assert parse_source(f"{name}=/place") == (name, "/place")
    if not is_folder_location(name):
        assert default_name(name) == resolve_location(name) == name


# --- the model list -----------------------------------------------------------------------------


def test_model_list_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    assert read_model_list(file) == {}
    write_model_list(file, {"b": "/ä", "a": "org/name"})
    assert list(read_model_list(file).items()) == [("a", "org/name"), ("b", "/ä")]
    write_model_list(file, {})
    assert read_model_list(file) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["models.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"models": []}', '{"models": 3}'])
def test_damaged_model_list_explains_format(tmp_path: Path, text: str) -> None:
    file = tmp_path / "models.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is damaged; expected") as refused:
        read_model_list(file)
    assert str(file) in refused.value.message


def test_unreadable_model_list_raises(tmp_path: Path) -> None:
    (tmp_path / "models.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_list(tmp_path / "models.json")


# --- evictions ----------------------------------------------------------------------------------


def test_evictions_are_lru_and_minimal() -> None:
    loaded = {"old": 40, "middle": 40, "new": 20}
    assert choose_evictions(0, 100, loaded, ()) == []
    assert choose_evictions(30, 100, loaded, ()) == ["old"]
    assert choose_evictions(41, 100, loaded, ()) == ["old", "middle"]
    assert choose_evictions(30, 0, loaded, ()) == []


def test_busy_models_are_not_evicted() -> None:
    loaded = {"old": 40, "middle": 40}
    assert choose_evictions(30, 100, loaded, {"old"}) == ["middle"]
    assert can_fit(30, 100, loaded, {"old"})
    assert choose_evictions(70, 100, loaded, {"old"}) == ["middle"]
    assert not can_fit(70, 100, loaded, {"old"})
    assert can_fit(1 << 60, 0, loaded, {"old"})


@given(
    st.integers(0, 100),
    st.integers(1, 300),
    st.dictionaries(st.text(max_size=3), st.integers(0, 100), max_size=6),
    st.sets(st.text(max_size=3), max_size=3),
)
def test_evictions_free_enough_or_only_busy_remain(
    needed: int, budget: int, loaded: dict[str, int], busy: set[str]
) -> None:
    doomed = choose_evictions(needed, budget, loaded, busy)
    assert not busy & set(doomed)
    left = {name: size for name, size in loaded.items() if name not in doomed}
    assert sum(left.values()) + needed <= budget or set(left) <= busy
    if can_fit(needed, budget, loaded, busy):
        assert sum(left.values()) + needed <= budget
