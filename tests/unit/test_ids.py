"""tinker:// paths, names and ids."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.errors import InvalidInput
from tinkex.ids import (
    check_checkpoint_id,
    check_id,
    check_name,
    looks_like_checkpoint,
    new_id,
    parse_tinker_path,
    path_segment,
)


@pytest.mark.parametrize(
    ("segment", "kind"),
    [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")],
)
def test_path_round_trip(segment: str, kind: str) -> None:
    text = f"tinker://abc:train:0/{segment}/step-1.2"
    path = parse_tinker_path(text)
    assert (path.run_id, path.segment, path.name) == ("abc:train:0", segment, "step-1.2")
    assert (path.checkpoint_type, path.checkpoint_id) == (kind, f"{segment}/step-1.2")
    assert str(path) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc/weights/1",
        "https://abc/weights/1",
        "tinker://",
        "tinker://abc",
        "tinker:///weights/1",
        "tinker://abc/weights/",
        "tinker://abc//1",
        "tinker://abc/weights/1/2",
        "tinker://abc/checkpoints/1",
        "tinker://../weights/1",
        "tinker://a b/weights/1",
        "tinker://a?b/weights/1",
        "tinker://abc/weights/..",
        "tinker://abc/weights/a%2Fb",
        "tinker://abc/weights/a\n",
        None,
        5,
        b"tinker://abc/weights/1",
    ],
)
def test_invalid_path_is_refused(text: Any) -> None:
    with pytest.raises(InvalidInput, match="Invalid"):
        parse_tinker_path(text)


def test_path_error_shows_path_and_expected_form() -> None:
    with pytest.raises(InvalidInput, match="'tinker://abc'; expected tinker://<run>/<weights"):
        parse_tinker_path("tinker://abc")
    with pytest.raises(InvalidInput, match="'other' is not one of weights, sampler_weights"):
        parse_tinker_path("tinker://abc/other/1")


@pytest.mark.parametrize("name", ["a", "0001", "_x", "step-1.2+b@c~d=e:f", "a" * 255])
def test_valid_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "a\\b", "a b", "a\x00", "é", "a" * 256, None, 5]
)
def test_invalid_names_are_refused_with_their_value(name: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_name(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("value", ["abc:train:0", "é", "a.b", "...", "a" * 300])
def test_valid_ids_are_accepted(value: str) -> None:
    assert check_id("session id", value) == value


@pytest.mark.parametrize(
    "value", ["", ".", "..", "a/b", "a?b", "a#b", "a%b", "a\\b", "a b", "\x7f", 5]
)
def test_invalid_ids_are_refused_with_their_kind(value: Any) -> None:
    with pytest.raises(InvalidInput, match="Invalid session id"):
        check_id("session id", value)


def test_path_segment_keeps_only_colons() -> None:
    assert path_segment("a:train:0") == "a:train:0"
    assert path_segment("a/b?c#d e%") == "a%2Fb%3Fc%23d%20e%25"


def test_new_ids_are_unique_and_valid() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(check_id("id", value) == value for value in ids)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("0001", ", as `tinkex checkpoint list` shows it"),
        ("weights/0001", ", as `tinkex checkpoint list` shows it"),
        ("run:train:0/weights/0001", "; did you mean 'tinker://run:train:0/weights/0001'?"),
        (None, ", as `tinkex checkpoint list` shows it"),
    ],
)
def test_bare_checkpoint_id_error_shows_the_path_form(given: object, hint: str) -> None:
    shape = "expected tinker://<run>/<weights|sampler_weights|external_weights>/<name>"
    with pytest.raises(InvalidInput) as caught:
        parse_tinker_path(given)  # type: ignore[arg-type]
    assert str(caught.value) == f"Invalid tinker path: {given!r}; {shape}{hint}"


@pytest.mark.parametrize("wrong", ["0001", "run/weights/0001", "weights/", "weights/a/b", "x/0001"])
def test_checkpoint_id_has_kind_and_name(wrong: str) -> None:
    assert check_checkpoint_id("weights/0001") == "weights/0001"
    with pytest.raises(InvalidInput, match="<name>, such as weights/0001"):
        check_checkpoint_id(wrong)


def test_checkpoint_ids_are_distinguished_from_model_names() -> None:
    assert all(map(looks_like_checkpoint, ("0001", "weights/0001", "run/sampler_weights/x")))
    assert not any(map(looks_like_checkpoint, ("Qwen/Qwen3-8B", "tinkex/tiny", "smollm2-135m")))
