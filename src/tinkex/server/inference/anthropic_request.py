"""The body of Anthropic's Messages API, as it arrives; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A content block of any type; only the fields of its type are set."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Mapping[str, object] | None = None
    tool_use_id: str | None = None
    content: str | Sequence[Block] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the conversation."""

    role: str
    content: str | Sequence[Block]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs, or one of Anthropic's own, named by `type`."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: Mapping[str, object] | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and which tools must be used."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model reasons before it answers."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer."""

    type: str
    schema: Mapping[str, object] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Effort and form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the client says about the request."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation; what counting its tokens and continuing it have in common."""

    model: str
    messages: Sequence[Message]
    system: str | Sequence[Block] | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""
    context_management: Mapping[str, object] | None = None
    container: object = None
    mcp_servers: object = None
    compaction: object = None
    fallbacks: object = None
    thread: object = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to be continued."""

    max_tokens: int
    stop_sequences: Sequence[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Not part of Anthropic's API: makes an answer reproducible."""
    stream: bool | None = None
    metadata: Metadata | None = None
