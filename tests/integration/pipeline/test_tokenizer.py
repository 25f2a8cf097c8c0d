"""The tokenizer: special tokens, round trips and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.integration.pipeline.stage_inputs import make_tokenizer, write_rows, write_samples
from tinkex.data.chatml import SPECIAL_TOKENS, TAG_TOKENS, render_prompt, render_spans
from tinkex.errors import ConfigError
from tinkex.pipeline.tokenizer import (
    MIN_VOCAB_SIZE,
    TextTokenizer,
    load_tokenizer,
    main,
    train_tokenizer_folder,
)

TOOLS = [{"name": "now", "arguments": {"zone": "é"}}]
TALKS: list[tuple[list[dict[str, Any]], list[Any]]] = [
    ([{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}], []),
    (
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {}}]},
            {"role": "tool", "content": "9"},
            {"role": "assistant", "content": "9.", "reasoning_content": "It says 9."},
        ],
        TOOLS,
    ),
    (
        [
            {"role": "user", "content": "Sum?"},
            {"role": "assistant", "content": "<think>2</think><answer>2</answer>"},
        ],
        TOOLS,
    ),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder / "made", list(write_samples(folder).values()))


def test_special_tokens_and_tags_are_single_tokens(tokenizer: TextTokenizer) -> None:
    for tag in (*SPECIAL_TOKENS, *TAG_TOKENS):
        (ids,) = tokenizer.encode_batch([f"so{tag}then"])
        assert ids.count(tokenizer.token_id(tag)) == 1
        assert tokenizer.decode(ids) == f"so{tag}then"
    assert [tokenizer.token_id(mark) for mark in SPECIAL_TOKENS] == [0, 1, 2]


@settings(deadline=None)
@given(st.text(max_size=60))
def test_encode_decode_round_trip(tokenizer: TextTokenizer, text: str) -> None:
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


def test_digits_are_single_tokens(tokenizer: TextTokenizer) -> None:
    (ids,) = tokenizer.encode_batch(["1234"])
    assert [tokenizer.decode([token]) for token in ids] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(("messages", "tools"), TALKS)
def test_chat_template_matches_the_renderer(
    tokenizer: TextTokenizer, messages: list[dict[str, Any]], tools: list[Any]
) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder)
    text = "".join(part.text for part in render_spans(messages, tools))
    assert theirs.apply_chat_template(messages, tools=tools or None, tokenize=False) == text
    asked = messages[:1]
    assert theirs.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    ) == render_prompt(asked)


def test_span_tokens_concatenate_to_the_full_tokens(tokenizer: TextTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder)
    for messages, tools in TALKS:
        parts = tokenizer.encode_batch([part.text for part in render_spans(messages, tools)])
        whole = theirs.apply_chat_template(messages, tools=tools or None, return_dict=False)
        assert [token for ids in parts for token in ids] == whole


def test_thinking_can_be_disabled(tokenizer: TextTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder)
    text = theirs.apply_chat_template(
        TALKS[0][0][:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")


def test_transformers_tokenizes_identically(tokenizer: TextTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder)
    text = "What is 3 plus 4? <think>7</think>"
    assert theirs.encode(text) == tokenizer.encode_batch([text])[0]
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
    # Tags stay visible in decoded text; ChatML delimiters do not.
    ids = theirs.encode("<think>a</think><|im_end|>")
    assert theirs.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_tokenizer_is_retrained_only_after_a_change(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "a.jsonl", [{"text": "aaa bbb"}]), tmp_path / "made"
    assert train_tokenizer_folder([data], out, 300) is True
    before = (out / "tokenizer.json").stat().st_ino
    assert train_tokenizer_folder([data], out, 300) is False
    assert (out / "tokenizer.json").stat().st_ino == before
    write_rows(data, [{"text": "ccc ddd"}])
    assert train_tokenizer_folder([data], out, 300) is True
    assert train_tokenizer_folder([data], out, 301) is True


def test_command_writes_a_folder_and_reports_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_rows(tmp_path / "a.jsonl", [{"text": "aaa bbb aaa"}])
    words = ["--out", str(tmp_path / "made"), "--vocab_size", "300"]
    assert main(["--data", str(good), *words]) == 0
    assert load_tokenizer(tmp_path / "made").vocab_size <= 300
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{oops\n')
    assert main(["--data", str(good), str(bad), "--out", str(tmp_path / "other")]) == 1
    assert f"{bad}, line 2" in capsys.readouterr().err
    # No partial output is left.
    assert not [
        path for path in tmp_path.iterdir() if path.name not in {"a.jsonl", "bad.jsonl", "made"}
    ]


def test_interrupted_command_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinkex.pipeline.tokenizer.train_tokenizer", stop)
    (tmp_path / "rows.jsonl").write_text('{"text": "one two"}\n')
    words = ["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "tokenizer")]
    assert main(words) == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_too_small_vocabulary_is_rejected(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match=str(MIN_VOCAB_SIZE)):
        train_tokenizer_folder([data], tmp_path / "made", 100)


def test_missing_or_invalid_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a valid tokenizer"):
        load_tokenizer(tmp_path)
