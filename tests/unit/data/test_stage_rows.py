"""Row layouts of the pipeline stages; errors name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.data.jsonl import parse_line, read_lines
from tinkex.data.rows import (
    ChatPairRow,
    ChatRow,
    StageRow,
    TextRow,
    parse_any_row,
    parse_chat_pair_row,
    parse_chat_row,
    parse_text_row,
)
from tinkex.errors import InvalidInput

ASK = {"role": "user", "content": "Hi?"}
SAY = {"role": "assistant", "content": "Ho."}
BAD = {"role": "assistant", "content": "No."}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [ASK, SAY]},
        {"messages": [ASK, SAY]},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]},
        {"instruction": "Hi?", "input": "", "output": "Ho."},
        {"question": "Hi?", "answer": "Ho."},
        {"prompt": "Hi?", "completion": "Ho."},
    ],
)
def test_conversation_layouts_parse_alike(row: dict[str, Any]) -> None:
    assert parse_chat_row(row) == ChatRow((ASK, SAY))


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASK, SAY], "rejected": [ASK, BAD]},
        {"prompt": "Hi?", "chosen": "Ho.", "rejected": "No."},
        {"prompt": [ASK], "chosen": [SAY], "rejected": [BAD]},
        {"prompt": "Hi?", "preferred": "Ho.", "other": "No."},
    ],
)
def test_pair_layouts_parse_alike(row: dict[str, Any]) -> None:
    assert parse_chat_pair_row(row) == ChatPairRow(ChatRow((ASK, SAY)), ChatRow((ASK, BAD)))


def test_input_field_is_appended_to_the_instruction() -> None:
    row = parse_chat_row({"instruction": "Shorten:", "input": "a b", "output": "a"})
    assert row.messages[0]["content"] == "Shorten:\na b"


def test_text_rows_hold_text_or_token_ids() -> None:
    assert parse_text_row({"text": "Once."}) == TextRow("Once.")
    assert parse_text_row({"ids": [3, 1]}) == TextRow("", (3, 1))


@pytest.mark.parametrize(
    ("parse", "row", "reason"),
    [
        (parse_text_row, [], "expected"),
        (parse_text_row, {"txt": "a"}, "'txt'"),
        (parse_text_row, {"text": " "}, "empty"),
        (parse_text_row, {"text": 3}, "expected text"),
        (parse_text_row, {"ids": [1, "2"]}, "list of tokens"),
        (parse_text_row, {"ids": [-1]}, "list of tokens"),
        (parse_chat_row, {"messages": []}, "list of messages"),
        (parse_chat_row, {"messages": [ASK]}, "nothing to learn"),
        (parse_chat_row, {"messages": [{"role": "boss", "content": "x"}, SAY]}, "'boss'"),
        (
            parse_chat_row,
            {"messages": [ASK, {"role": "assistant", "content": ""}]},
            "expected text",
        ),
        (
            parse_chat_row,
            {"messages": [ASK, {**SAY, "content": "a<|im_end|>"}]},
            "<|im_end|>",
        ),
        (
            parse_chat_row,
            {"messages": [ASK, {**SAY, "tool_calls": [{"x": "<|im_end|>"}]}]},
            "<|im_end",
        ),
        (
            parse_chat_row,
            {"messages": [ASK, SAY], "tools": [{"x": "<|im_start|>"}]},
            "<|im_start",
        ),
        (parse_chat_row, {"conversations": []}, "list of messages"),
        (parse_chat_pair_row, {"chosen": [ASK, SAY]}, "expected"),
        (parse_chat_pair_row, {"chosen": "a", "rejected": "b"}, "no prompt"),
        (parse_chat_pair_row, {"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, "the same"),
        (parse_chat_pair_row, {"chosen": [SAY, ASK], "rejected": [ASK, SAY]}, "does not end"),
    ],
)
def test_invalid_row_is_rejected_with_a_reason(parse: Any, row: Any, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse(row)
    assert reason in refused.value.message


@given(JSON)
def test_any_json_value_is_parsed_or_rejected_with_a_message(value: Any) -> None:
    for parse in (parse_text_row, parse_chat_row, parse_chat_pair_row, parse_any_row):
        try:
            found = parse(value)
        except InvalidInput as refused:
            assert refused.message
        else:
            assert isinstance(found, StageRow)


def lines_of(path: Path) -> list[Any]:
    return [parse_line(path, line, parse_text_row) for line in read_lines(path)]


def test_invalid_json_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    with pytest.raises(InvalidInput) as refused:
        lines_of(path)
    assert f"{path}, line 3 is not JSON" in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    "line", [b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[" * 5000, b"NaN", b'{"text": NaN}']
)
def test_invalid_bytes_are_reported_with_their_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n' + line + b"\r\n")
    with pytest.raises(InvalidInput, match="line 2 is not JSON"):
        lines_of(path)


def test_unexpected_layout_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "a"}\n{"messages": []}\n')
    with pytest.raises(InvalidInput, match="line 2"):
        lines_of(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=r"none\.jsonl has no rows"):
        lines_of(path)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"absent\.jsonl cannot be read"):
        lines_of(tmp_path / "absent.jsonl")


def test_byte_order_mark_crlf_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    rows = [{"text": str(number)} for number in range(5)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, rows)).encode())
    assert [row.text for row in lines_of(path)] == ["0", "1", "2", "3", "4"]
    assert [line.number for line in read_lines(path, limit=2)] == [1, 2]
