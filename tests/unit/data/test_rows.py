from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.data.jsonl import JsonlFile
from tinkex.data.rows import (
    ChatRow,
    PreferenceRow,
    PromptCompletionRow,
    PromptRow,
    parse_preference,
    parse_prompt,
    parse_sft,
)
from tinkex.errors import InvalidInput

GOOD = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TEXTS = st.text(min_size=1)


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_read_rows_returns_rows_in_the_requested_order(tmp_path: Path) -> None:
    path = write(tmp_path, lines(*({"prompt": str(n), "completion": "x"} for n in range(5))))
    rows = JsonlFile(path, parse_sft)
    assert len(rows) == 5
    assert rows.read_rows([3, 0, 3]) == [
        PromptCompletionRow("3", "x"),
        PromptCompletionRow("0", "x"),
        PromptCompletionRow("3", "x"),
    ]


def test_a_file_may_mix_chat_and_prompt_completion_rows(tmp_path: Path) -> None:
    rows = JsonlFile(write(tmp_path, lines(GOOD, CHAT)), parse_sft).read_rows([0, 1])
    assert rows == [PromptCompletionRow("a", "b"), ChatRow(tuple(CHAT["messages"]))]


def test_byte_order_mark_blank_lines_and_crlf_are_accepted(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    path = write(tmp_path, b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    rows = JsonlFile(path, parse_sft)
    assert rows.read_rows([0, 1]) == [PromptCompletionRow("a", "b")] * 2
    assert rows.describe_location(1) == f"{path}, line 4"


def test_digest_depends_on_the_content(tmp_path: Path) -> None:
    first = JsonlFile(write(tmp_path, lines(GOOD)), parse_sft).digest
    second = JsonlFile(write(tmp_path, lines(GOOD, GOOD)), parse_sft).digest
    assert first != second
    assert len(first) == 64


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_file_without_rows_is_rejected(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidInput, match=r"rows\.jsonl has no rows; expected one JSON object"):
        JsonlFile(write(tmp_path, content), parse_sft)


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_unreadable_file_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: "):
        JsonlFile(tmp_path / name, parse_sft)


@pytest.mark.parametrize(
    "broken", [b'{"prompt": "a"', b"nonsense", b'{"prompt": "\xff"}', b"\xff\xfe{\x00"]
)
def test_invalid_json_is_reported_with_its_line_number(tmp_path: Path, broken: bytes) -> None:
    path = write(tmp_path, json.dumps(GOOD).encode() + b"\n" + broken + b"\n")
    with pytest.raises(InvalidInput, match=r"rows\.jsonl, line 2 is not JSON"):
        JsonlFile(path, parse_sft)


@pytest.mark.parametrize(
    ("parse", "row", "message"),
    [
        (parse_sft, [1], r"found \[1\]; expected"),
        (parse_sft, {"text": "a"}, "no field 'prompt' in 'text'; expected"),
        (parse_sft, {}, "no field 'prompt' in an empty row"),
        (parse_sft, {"prompt": "a"}, "no field 'completion'"),
        (parse_sft, {"prompt": 1, "completion": "b"}, "prompt is 1; expected text"),
        (parse_sft, {"prompt": "a", "completion": ""}, "nothing to learn"),
        (parse_sft, {"messages": []}, r"messages is \[\]"),
        (parse_sft, {"messages": ["hi"]}, r"messages\[0\] is 'hi'"),
        (parse_sft, {"messages": [{"content": "a"}]}, r"messages\[0\] has no role"),
        (parse_sft, {"messages": [{"role": "user"}]}, r"messages\[0\] has the content None"),
        (parse_sft, {"messages": CHAT["messages"][:1]}, "no message has the role 'assistant'"),
        (parse_preference, {"prompt": "a", "chosen": "b"}, "no field 'rejected'"),
        (parse_preference, {"prompt": "a", "chosen": 1, "rejected": "c"}, "chosen is 1"),
        (parse_preference, {"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        (parse_preference, {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        (parse_prompt, {"prompt": ""}, "prompt is empty"),
        (parse_prompt, {"question": "a"}, "no field 'prompt'"),
        (parse_prompt, {"prompt": 5}, "prompt is 5; expected text"),
    ],
)
def test_invalid_row_is_reported_with_its_line_number(
    tmp_path: Path, parse: Any, row: Any, message: str
) -> None:
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl, line 1: .*{message}"):
        JsonlFile(write(tmp_path, lines(row)), parse)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": CHAT["messages"]},
        {"messages": [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]},
        {"instruction": "a", "input": "", "output": "b"},
        {"question": "a", "answer": "b"},
    ],
)
def test_conversation_layouts(row: dict[str, Any]) -> None:
    assert parse_sft(row) == ChatRow(tuple(CHAT["messages"]))


def test_input_field_is_appended_to_the_instruction() -> None:
    row = parse_sft({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert isinstance(row, ChatRow)
    assert row.messages[0]["content"] == "Add.\n1 2"


def test_unknown_roles_are_passed_to_the_template() -> None:
    message = {"role": "developer", "content": "Be brief."}
    row = parse_sft({"messages": [message, *CHAT["messages"]]})
    assert isinstance(row, ChatRow)
    assert row.messages[0] == message


def test_tool_call_without_content_is_unchanged() -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    row = parse_sft({"messages": [CHAT["messages"][0], call]})
    assert row == ChatRow((CHAT["messages"][0], call))


def test_invalid_json_is_shown_decoded(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        JsonlFile(write(tmp_path, '{"prompt": "für"'), parse_sft)
    assert """'{"prompt": "für"'""" in refused.value.message
    assert "b'" not in refused.value.message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [CHAT["messages"][0]], "preferred": "b", "other": "c"},
        {
            "chosen": CHAT["messages"],
            "rejected": [CHAT["messages"][0], {"role": "assistant", "content": "c"}],
        },
    ],
)
def test_preference_layouts(row: dict[str, Any]) -> None:
    assert parse_preference(row) == PreferenceRow((CHAT["messages"][0],), "b", "c")


def test_conversations_that_differ_before_the_last_message_are_rejected() -> None:
    other = [{"role": "user", "content": "z"}, {"role": "assistant", "content": "c"}]
    with pytest.raises(InvalidInput, match="same conversation up to their last message"):
        parse_preference({"chosen": CHAT["messages"], "rejected": other})


def test_preference_answers_may_be_text_or_a_single_message() -> None:
    prompt = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "yes"}]
    row = parse_preference({"prompt": prompt, "chosen": answer, "rejected": "no"})
    assert row == PreferenceRow(tuple(prompt), "yes", "no")


def test_prompt_row_keeps_all_fields_for_the_reward_function() -> None:
    assert parse_prompt({"prompt": "2+2", "answer": 4}) == PromptRow(
        "2+2", {"prompt": "2+2", "answer": 4}
    )


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_any_text_round_trips(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]], end: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / "any.jsonl"
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    path.write_bytes(end.join(map(json.dumps, rows)).encode())
    found = JsonlFile(path, parse_sft).read_rows(range(len(texts)))
    assert [
        (row.prompt, row.completion) for row in found if isinstance(row, PromptCompletionRow)
    ] == texts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON | st.fixed_dictionaries({"messages": JSON}) | st.fixed_dictionaries({"prompt": JSON}))
def test_any_json_value_is_parsed_or_rejected_with_a_message(value: Any) -> None:
    for parse in (parse_sft, parse_preference, parse_prompt):
        try:
            parse(value)
        except InvalidInput as error:
            assert error.message
