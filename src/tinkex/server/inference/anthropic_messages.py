"""Requests of Anthropic's Messages API as requests of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from tinkex.errors import InvalidInput
from tinkex.server.inference.anthropic_blocks import TemplateMessage, to_template_messages
from tinkex.server.inference.anthropic_request import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    Thinking,
    Tool,
)
from tinkex.server.inference.chat_request import ChatRequest, SamplingSettings, ToolChoice

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARS = 1000
MAX_USER_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**63 - 1

_TOOL_CHOICES: Mapping[str, ToolChoice] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
#: Whether the chat template is asked to let the model reason.
_THINKING_TYPES = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
#: Fields that would change the answer; refused unless they are empty.
_UNSUPPORTED_FIELDS = ("container", "mcp_servers", "compaction", "fallbacks", "thread")


def to_chat_request(request: CountTokensRequest) -> ChatRequest:
    """Convert a request; raises InvalidInput that names the field which cannot be honoured."""
    _check_unsupported(request)
    messages = _convert_messages(request)
    is_prefill = messages[-1]["role"] == "assistant"
    tools = [_convert_tool(f"tools.{i}", tool) for i, tool in enumerate(request.tools or ())]
    if len(tools) > MAX_TOOLS:
        raise InvalidInput(f"tools: at most {MAX_TOOLS} tools are accepted, got {len(tools)}")
    tool_choice, forced_tool = _convert_tool_choice(request)
    choice = request.tool_choice
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        has_parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        sampling=_convert_sampling(request),
        template_variables=_template_variables(request),
        has_generation_prompt=not is_prefill,
        continues_final_message=is_prefill,
        user=_user_of(request),
    )


def _check_unsupported(request: CountTokensRequest) -> None:
    for name in _UNSUPPORTED_FIELDS:
        if getattr(request, name):
            raise InvalidInput(f"{name}: this server does not support it; leave it out")
    edits = (request.context_management or {}).get("edits")
    for edit in edits if isinstance(edits, Sequence) else ():
        # Nothing is cleared: the chat template decides which reasoning it shows.
        if not isinstance(edit, Mapping) or edit.get("keep") != "all":
            raise InvalidInput(
                "context_management.edits: this server does not edit the context; leave them out"
            )


def _convert_messages(request: CountTokensRequest) -> list[TemplateMessage]:
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        raise InvalidInput(
            f"messages: 1 to {MAX_MESSAGES} messages are accepted, got {len(request.messages)}"
        )
    messages = to_template_messages(request.system, request.messages)
    last = messages[-1]
    if last["role"] != "assistant":
        return messages
    if "tool_calls" in last:
        raise InvalidInput(
            "messages: the last message has tool_use blocks without results; "
            "answer them with tool_result blocks"
        )
    if last["content"] or len(messages) == 1:
        return messages
    # Nothing to continue.
    return messages[:-1]


def _convert_tool(where: str, tool: Tool) -> dict[str, object]:
    if tool.type not in {None, "custom"}:
        raise InvalidInput(
            f"{where}.type: this server does not have the tool {tool.type!r}; "
            "describe your own tools with name and input_schema"
        )
    if not tool.name or tool.input_schema is None:
        raise InvalidInput(f"{where}: a tool needs name and input_schema")
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _convert_tool_choice(request: CountTokensRequest) -> tuple[ToolChoice, str | None]:
    """Return the choice, and the only tool that may be used."""
    choice = request.tool_choice
    if choice is None:
        return "auto", None
    if choice.type not in _TOOL_CHOICES:
        kinds = ", ".join(_TOOL_CHOICES)
        raise InvalidInput(f"tool_choice.type: must be one of {kinds}, got {choice.type!r}")
    if choice.type in {"any", "tool"} and not request.tools:
        raise InvalidInput(f"tool_choice: {choice.type!r} needs tools")
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type], None
    names = [tool.name for tool in request.tools or ()]
    if choice.name not in names:
        raise InvalidInput(f"tool_choice.name: {choice.name!r} is not one of the tools")
    return "required", choice.name


def _convert_sampling(request: CountTokensRequest) -> SamplingSettings:
    grammar = _grammar_of(request)
    if not isinstance(request, MessagesRequest):
        return SamplingSettings(grammar=grammar)
    if request.max_tokens < 1:
        raise InvalidInput(f"max_tokens: must be at least 1, got {request.max_tokens}")
    return SamplingSettings(
        max_tokens=request.max_tokens,
        temperature=_fraction("temperature", request.temperature),
        top_p=_top_p(request.top_p),
        top_k=_top_k(request.top_k),
        seed=_seed(request.seed),
        stop=_stop_sequences(request.stop_sequences or ()),
        grammar=grammar,
    )


def _fraction(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if not isfinite(value) or not 0.0 <= value <= 1.0:
        raise InvalidInput(f"{name}: must be between 0 and 1, got {value}")
    return value


def _top_p(value: float | None) -> float:
    if value == 0.0:
        raise InvalidInput("top_p: must be greater than 0; use temperature 0 for greedy decoding")
    return _fraction("top_p", value)


def _top_k(value: int | None) -> int:
    if value is None or value in {0, -1}:
        return -1
    if not 1 <= value <= MAX_TOP_K:
        raise InvalidInput(
            f"top_k: must be between 1 and {MAX_TOP_K}, or 0 for no limit, got {value}"
        )
    return value


def _seed(value: int | None) -> int | None:
    if value is not None and not -MAX_SEED <= value <= MAX_SEED:
        raise InvalidInput(f"seed: must be between {-MAX_SEED} and {MAX_SEED}, got {value}")
    return value


def _stop_sequences(given: Sequence[str]) -> tuple[str, ...]:
    if len(given) > MAX_STOP_SEQUENCES:
        raise InvalidInput(
            f"stop_sequences: at most {MAX_STOP_SEQUENCES} are accepted, got {len(given)}"
        )
    for index, text in enumerate(given):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidInput(
                f"stop_sequences.{index}: must have 1 to {MAX_STOP_CHARS} characters, "
                f"got {len(text)}"
            )
    return tuple(given)


def _grammar_of(request: CountTokensRequest) -> Mapping[str, object] | None:
    wanted = _output_format(request)
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise InvalidInput(
            "output_config.format: must have the type json_schema and a schema, "
            f"got {wanted.type!r}"
        )
    return wanted.schema


def _output_format(request: CountTokensRequest) -> OutputFormat | None:
    if request.output_config is not None and request.output_config.format is not None:
        return request.output_config.format
    return request.output_format


def _template_variables(request: CountTokensRequest) -> dict[str, object]:
    variables: dict[str, object] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = _is_thinking(request.thinking, request)
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return variables


def _is_thinking(thinking: Thinking, request: CountTokensRequest) -> bool:
    if thinking.type not in _THINKING_TYPES:
        kinds = ", ".join(_THINKING_TYPES)
        raise InvalidInput(f"thinking.type: must be one of {kinds}, got {thinking.type!r}")
    budget = thinking.budget_tokens
    if budget is not None and isinstance(request, MessagesRequest) and budget >= request.max_tokens:
        raise InvalidInput(
            f"thinking.budget_tokens: must be less than max_tokens ({request.max_tokens}), "
            f"got {budget}"
        )
    return _THINKING_TYPES[thinking.type]


def omits_thinking(request: MessagesRequest) -> bool:
    """Whether the answer shows that the model reasoned, but not its reasoning."""
    return request.thinking is not None and request.thinking.display == "omitted"


def _user_of(request: CountTokensRequest) -> str | None:
    if not isinstance(request, MessagesRequest) or request.metadata is None:
        return None
    user = request.metadata.user_id
    return None if user is None else user[:MAX_USER_CHARS]
