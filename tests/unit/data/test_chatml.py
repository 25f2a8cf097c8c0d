"""ChatML spans."""

from __future__ import annotations

from tinkex.data.chatml import ChatSpan, render_prompt, render_spans

TALK = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Ho.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "More?"},
    {"role": "assistant", "content": "No."},
)


def test_only_assistant_content_and_its_end_token_are_targets() -> None:
    assert render_spans(TALK) == [
        ChatSpan(
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
            "<|im_start|>assistant\n",
            False,
        ),
        ChatSpan("<think>\nA greeting.\n</think>\n\nHo.<|im_end|>", True),
        ChatSpan("\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n", False),
        ChatSpan("No.<|im_end|>", True),
        ChatSpan("\n", False),
    ]


def test_prompt_ends_where_the_target_starts() -> None:
    assert render_prompt(TALK[:2]) == render_spans(TALK)[0].text


def test_tool_calls_are_targets_and_tool_responses_are_not() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {}}]}
    parts = render_spans(
        ({"role": "user", "content": "Time?"}, call, {"role": "tool", "content": "9"})
    )
    learned = [part.text for part in parts if part.is_learned]
    assert learned == ['<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>']
    assert "<tool_response>\n9\n</tool_response>" in parts[-1].text
