"""Prompts from options, files and stdin, as text or token ids."""

from __future__ import annotations

import io
import json
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.run.sample import PromptInput, parse_tokens, read_prompt
from tinkex.cli.errors import CliError
from tinkex.engine.fake.toy_tokenizer import toy_tokenizer
from tinkex.errors import InvalidInput


@given(st.lists(st.integers(min_value=0, max_value=2**31 - 1), min_size=1))
def test_token_id_formats(tokens: list[int]) -> None:
    for text in (json.dumps(tokens), ",".join(map(str, tokens)), " ".join(map(str, tokens))):
        assert parse_tokens(text) == tuple(tokens)


@given(st.text())
def test_any_text_is_token_ids_or_none(text: str) -> None:
    found = parse_tokens(text)
    assert found is None or (len(found) > 0 and all(token >= 0 for token in found))


@pytest.mark.parametrize("text", ["", "[]", "-1", "1.5", "[1, 2", "hello", "1,x", "²"])
def test_invalid_token_ids(text: str) -> None:
    assert parse_tokens(text) is None


def test_missing_prompt_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="No prompt"):
        read_prompt(None, None, None)


@pytest.mark.parametrize(
    ("given_prompts", "named"),
    [
        (("a", "b", None), "--prompt and --prompt-file"),
        (("a", None, "1"), "--prompt and --prompt-tokens"),
        ((None, "b", "1"), "--prompt-file and --prompt-tokens"),
    ],
)
def test_two_prompts_are_a_usage_error(
    given_prompts: tuple[str | None, str | None, str | None], named: str
) -> None:
    with pytest.raises(click.UsageError, match=f"{named} cannot be combined"):
        read_prompt(*given_prompts)


def test_last_newline_of_file_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("one\ntwo\n\n")
    assert read_prompt(None, str(path), None) == PromptInput(text="one\ntwo\n")


@pytest.mark.parametrize("place", [0, 1])
def test_a_dash_reads_stdin(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    given_prompts: list[str | None] = [None, None, None]
    given_prompts[place] = "-"
    assert read_prompt(*given_prompts) == PromptInput(text="from a pipe")


def test_file_of_numbers_is_text_with_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ids.json"
    path.write_text("[1, 2, 3]")
    assert read_prompt(None, str(path), None) == PromptInput(text="[1, 2, 3]")
    told = capsys.readouterr()
    assert told.out == ""
    assert f"--prompt-tokens {path} reads it as token ids" in told.err
    assert read_prompt(None, None, str(path)) == PromptInput(tokens=(1, 2, 3))


@pytest.mark.parametrize("text", ["[]", "[1.5]", "[true]", '{"a": 1}', "12", "[1, 2"])
def test_other_files_have_no_notice(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.write_text(text)
    assert read_prompt(None, str(path), None) == PromptInput(text=text)
    assert capsys.readouterr().err == ""


def test_invalid_prompts_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "words").write_text("no numbers")
    with pytest.raises(click.UsageError, match="empty"):
        read_prompt("", None, None)
    with pytest.raises(click.UsageError, match="is empty"):
        read_prompt(None, str(tmp_path / "empty"), None)
    with pytest.raises(CliError, match="not UTF-8 text"):
        read_prompt(None, str(tmp_path / "binary"), None)
    with pytest.raises(click.UsageError, match="contains no token ids"):
        read_prompt(None, None, str(tmp_path / "words"))
    with pytest.raises(FileNotFoundError):
        read_prompt(None, str(tmp_path / "nosuch"), None)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(click.UsageError, match="empty"):
        read_prompt("-", None, None)


def test_text_is_encoded_and_token_ids_are_unchanged() -> None:
    tokenizer = toy_tokenizer()
    assert PromptInput(text="ab").encode(tokenizer, as_chat=False) == [97, 98]
    assert PromptInput(tokens=(5, 6)).encode(tokenizer, as_chat=False) == [5, 6]
    assert PromptInput(tokens=(5, 6)).encode(None, as_chat=False) == [5, 6]
    chat = tokenizer.decode(PromptInput(text="ab").encode(tokenizer, as_chat=True))
    assert chat == "User: ab\n\nAssistant:"


def test_text_without_tokens_is_rejected() -> None:
    class Mute:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

        def decode(self, token_ids: object, *, skip_special_tokens: bool = False) -> str:
            return ""

    with pytest.raises((CliError, InvalidInput)):
        PromptInput(text="ab").encode(Mute(), as_chat=False)
