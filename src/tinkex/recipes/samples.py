"""What the trained model says: a few answers at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinkex.client.sampling import SamplingClient
from tinkex.errors import TinkexError
from tinkex.recipes.plan import Plan
from tinkex.recipes.rendering import Renderer
from tinkex.recipes.report import SampledAnswer
from tinkex.recipes.rows import ChatRow, Prompt
from tinkex.types import ModelInput, SamplingParams
from tinkex.units import format_count

_TEMPERATURE = 0.7


def choose_prompts(given: Sequence[str], first_row: Any) -> list[Prompt]:
    """The given prompts in the form the data has, or the prompt of its first row."""
    example = first_prompt(first_row)
    if not given:
        return [example]
    if isinstance(example, str):
        return list(given)
    return [({"role": "user", "content": text},) for text in given]


def first_prompt(row: Any) -> Prompt:
    """What stands in front of the first answer of a row."""
    if not isinstance(row, ChatRow):
        prompt: Prompt = row.prompt
        return prompt
    roles = [message["role"] for message in row.messages]
    # A conversation that the assistant begins still needs something to answer to.
    return row.messages[: roles.index("assistant")] or row.messages[:1]


def generate_samples(
    sampler: SamplingClient,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    tell: Callable[[str], None],
) -> tuple[SampledAnswer, ...]:
    """An answer to each prompt that has one; all are asked for at once."""
    params = SamplingParams(max_tokens=plan.sample_tokens, temperature=_TEMPERATURE, seed=plan.seed)
    asked = []
    for prompt in prompts:
        tokens = renderer.render_prompt(prompt)
        if not tokens or (
            renderer.max_tokens and len(tokens) + plan.sample_tokens > renderer.max_tokens
        ):
            tell(
                f"No sample: a prompt of {format_count(len(tokens), 'token')} leaves no room for "
                "an answer"
            )
        else:
            asked.append((prompt, sampler.sample(ModelInput.from_ints(tokens), 1, params)))
    found = []
    for prompt, future in asked:
        try:
            found.append(
                SampledAnswer(
                    prompt_text(prompt), renderer.decode(future.result().sequences[0].tokens)
                )
            )
        except TinkexError as error:
            tell(f"No sample: {error.message}")
    return tuple(found)


def prompt_text(prompt: Prompt) -> str:
    """A prompt as a person reads it: plain text, or the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
