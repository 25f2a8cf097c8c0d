"""What the scenarios ask, and what models answer: a trained adapter, or one that is scripted."""

from __future__ import annotations

import json
from typing import Any

QUESTION = "What is the weather in Paris?"
CALL: dict[str, Any] = {"name": "get_weather", "arguments": {"city": "Paris"}}
RESULT = "sunny"
ANSWER = "It is sunny in Paris."
#: Two calls in one answer.
BOTH = "Compare the weather in Rome and Oslo."
BOTH_CALLS: tuple[dict[str, Any], ...] = (
    {"name": "get_weather", "arguments": {"city": "Rome"}},
    {"name": "get_weather", "arguments": {"city": "Oslo"}},
)
#: Reasoning before the answer.
SUM = "How much is two and two?"
SUM_REASONING = "Two and two make four."
SUM_ANSWER = "It is four."
#: The built-in model answers these without training.
PLAIN = "What is 3 plus 4?"
PLAIN_ANSWER = "7"
COUNT = "Count from 3 to 7."
#: With a schema, any model answers with fields.
FIELDS = "What are the numbers in 3 plus 4?"

#: Longer than any context of the models here.
LONG = "word " * 40_000


def as_text(call: dict[str, Any]) -> str:
    """A call as models of this family write it."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


#: Question, or result of a tool: the text that follows it.
ANSWERS = {
    QUESTION: as_text(CALL),
    RESULT: ANSWER,
    BOTH: "\n".join(map(as_text, BOTH_CALLS)),
    SUM: f"<think>\n{SUM_REASONING}\n</think>\n\n{SUM_ANSWER}",
    PLAIN: PLAIN_ANSWER,
    COUNT: "3, 4, 5, 6, 7.",
    FIELDS: '{"left": 3, "right": 4}',
}


#: What follows the beginning of a call that the request forces: any function, a named one.
FORCED = as_text(CALL).removeprefix("<tool_call>")
FORCED_ARGUMENTS = FORCED.partition('"arguments":')[2]


def scripted(text: str, answer: str | None = None) -> str:
    """The text for a scripted model of the fake engine, which reads its answer in the prompt."""
    said = ANSWERS.get(text) if answer is None else answer
    return text if said is None else f"{text}[say]{said}[/say]"
