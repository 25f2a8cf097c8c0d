"""A chat request, independent of the API family that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

ToolChoice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the tokens of an answer are sampled."""

    max_tokens: int | None = None
    """None means what the context leaves."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer, in addition to the end-of-turn tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignores_eos: bool = False
    """Continue after EOS and end-of-turn tokens, until a stop condition or `max_tokens`."""
    num_choices: int = 1
    has_logprobs: bool = False
    num_top_logprobs: int = 0
    grammar: Mapping[str, object] | None = None
    """A JSON schema that the answer must follow; an empty one means any JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to be continued by a model."""

    model: str
    messages: Sequence[Mapping[str, object]]
    """As chat templates expect them: roles, contents as text, tool calls with parsed arguments."""
    tools: Sequence[Mapping[str, object]] = ()
    """In the form of OpenAI: `{"type": "function", "function": {...}}`."""
    tool_choice: ToolChoice = "auto"
    forced_tool: str | None = None
    """The name of the only function that may be called."""
    has_parallel_tool_calls: bool = True
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    template_variables: Mapping[str, object] = field(default_factory=dict)
    separates_reasoning: bool = True
    has_generation_prompt: bool = True
    continues_final_message: bool = False
    user: str | None = None
    """The end user, as the client names it; for the audit log."""
