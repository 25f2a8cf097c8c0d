"""Requests of OpenAI's chat completions as requests of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tinkex.server.inference.chat_request import ChatRequest, SamplingSettings, ToolChoice
from tinkex.server.inference.error_bodies import invalid_value, unsupported_value
from tinkex.server.inference.openai_request import (
    ChatCompletionRequest,
    parse_max_tokens,
    parse_sampling,
    parse_user,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
#: Roles as chat templates name them.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TOOL_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "none": "none", "required": "required"}


def to_chat_request(request: ChatCompletionRequest) -> ChatRequest:
    """Convert a request; raises InferenceError that names the field which cannot be honoured."""
    _check_unsupported(request)
    tools = _parse_tools(request)
    tool_choice, forced_tool = _parse_tool_choice(request, tools)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = parse_max_tokens(name, getattr(request, name))
    return ChatRequest(
        model=request.model,
        messages=_parse_messages(request.messages),
        tools=tools,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        has_parallel_tool_calls=request.parallel_tool_calls is not False,
        sampling=_parse_sampling(request, max_tokens),
        template_variables=_template_variables(request),
        separates_reasoning=request.separate_reasoning is not False,
        has_generation_prompt=_has_generation_prompt(request),
        continues_final_message=bool(request.continue_final_message),
        user=parse_user(request, request.safety_identifier),
    )


def _check_unsupported(request: ChatCompletionRequest) -> None:
    if any(modality != "text" for modality in request.modalities or ()):
        raise unsupported_value("modalities", "this server answers in text only")
    for name in ("audio", "prediction", "web_search_options"):
        if getattr(request, name) is not None:
            raise unsupported_value(name, f"{name} is not supported by this server; leave it out")


def _parse_sampling(request: ChatCompletionRequest, max_tokens: int | None) -> SamplingSettings:
    grammar = _parse_response_format(request.response_format)
    if grammar is not None and request.ignore_eos:
        raise invalid_value("ignore_eos", "ignore_eos cannot be combined with response_format")
    sampling = parse_sampling(request, max_tokens, _parse_top_logprobs(request))
    return replace(sampling, grammar=grammar)


def _parse_response_format(given: Mapping[str, Any] | None) -> Mapping[str, object] | None:
    """Return the JSON schema of the answer; an empty one means any object."""
    kind = (given or {"type": "text"}).get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        raise unsupported_value(
            "response_format", f"response_format {kind!r:.80} is not supported by this server"
        )
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid_value(
            "response_format", "response_format.json_schema.schema must be a JSON schema"
        )
    return schema


def _parse_top_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true")
    return (request.top_logprobs or 0) if request.logprobs else None


def _has_generation_prompt(request: ChatCompletionRequest) -> bool:
    if not request.continue_final_message:
        return request.add_generation_prompt is not False
    if request.add_generation_prompt:
        raise invalid_value(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other",
        )
    return False


def _template_variables(request: ChatCompletionRequest) -> dict[str, object]:
    variables: dict[str, object] = dict(request.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        variables.pop(name, None)
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            variables["enable_thinking"] = False
    return variables


# --- messages --------------------------------------------------------------------------------
def _parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid_value(
            "messages", f"messages has {len(messages)} messages; expected 1 to {MAX_MESSAGES}"
        )
    return [_parse_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _parse_message(where: str, message: Mapping[str, Any]) -> dict[str, object]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise invalid_value(f"{where}.role", f"{where}.role is {role!r:.80}; expected {known}")
    parsed: dict[str, object] = {"role": _ROLES[role]}
    calls = _parse_tool_calls(where, message) if role == "assistant" else []
    # An answer without text, which clients send back in the history, has no content either.
    is_optional = role == "assistant"
    parsed["content"] = _parse_content(f"{where}.content", message.get("content"), is_optional)
    if calls:
        parsed["tool_calls"] = calls
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str):
        parsed["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            parsed[name] = message[name]
    return parsed


def _parse_content(where: str, content: object, is_optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if not isinstance(content, list):
        raise invalid_value(where, f"{where} must be a text or a list of parts")
    return "".join(_parse_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _parse_part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in {"text", "refusal"}:
        raise unsupported_value(
            where, f"{where} has the type {kind!r:.80}; this server accepts text only"
        )
    assert isinstance(part, dict)
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid_value(where, f"{where}.{kind} must be a text")
    return text


def _parse_tool_calls(where: str, message: Mapping[str, Any]) -> list[dict[str, object]]:
    calls = message.get("tool_calls") or []
    if not calls and isinstance(message.get("function_call"), dict):
        calls = [{"function": message["function_call"]}]
    if not isinstance(calls, list):
        raise invalid_value(f"{where}.tool_calls", f"{where}.tool_calls must be a list")
    return [_parse_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]


def _parse_call(where: str, call: object) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(call, dict) or not isinstance(function, dict):
        raise invalid_value(where, f"{where} must have a function with a name and arguments")
    parsed: dict[str, object] = {
        "type": "function",
        "function": {"name": name, "arguments": _parse_arguments(function.get("arguments"))},
    }
    if isinstance(call.get("id"), str):
        parsed["id"] = call["id"]
    return parsed


def _parse_arguments(arguments: object) -> object:
    """Return arguments as an object for the template; text that is not one stays text."""
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, dict) else {}
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


# --- tools -----------------------------------------------------------------------------------
def _parse_tools(request: ChatCompletionRequest) -> list[dict[str, object]]:
    tools = request.tools or [
        {"type": "function", "function": function} for function in request.functions or ()
    ]
    if len(tools) > MAX_TOOLS:
        raise invalid_value("tools", f"tools has {len(tools)} tools; expected at most {MAX_TOOLS}")
    return [_parse_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _parse_tool(where: str, tool: Mapping[str, Any]) -> dict[str, object]:
    function = tool.get("function")
    if tool.get("type", "function") != "function":
        raise unsupported_value(where, f"{where}.type must be 'function'")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_value(where, f"{where} must have a function with a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise invalid_value(where, f"{where}.function.parameters must be a JSON schema")
    return {"type": "function", "function": function}


def _parse_tool_choice(
    request: ChatCompletionRequest, tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolChoice, str | None]:
    """Return the choice, and the only function that may be called."""
    choice = request.tool_choice
    if choice is None and request.function_call is not None:
        choice = request.function_call
        if isinstance(choice, dict):
            choice = {"function": choice}
    if choice is None:
        return ("auto" if tools else "none"), None
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES:
            raise invalid_value("tool_choice", f"tool_choice is {choice!r:.80}, which is unknown")
        if choice == "required" and not tools:
            raise invalid_value("tool_choice", "tool_choice 'required' needs tools")
        return _TOOL_CHOICES[choice], None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in {tool["function"]["name"] for tool in tools}:
        raise invalid_value("tool_choice", f"tool_choice names {name!r:.80}, which is not in tools")
    return "required", name
