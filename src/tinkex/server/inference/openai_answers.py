"""What responses of OpenAI's endpoints have in common: identity, usage, ids of tool calls, SSE."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2s

import msgspec

from tinkex import clock
from tinkex.server.config import ServerConfig
from tinkex.server.inference.error_bodies import ApiFamily, Failure, error_body
from tinkex.server.inference.generation import Usage
from tinkex.settings import package_version

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_TOOL_CALL_ID_CHARS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseIdentity:
    """The fields that all chunks of a response share."""

    id: str
    kind: str
    created: int
    model: str
    system_fingerprint: str

    def to_json(self) -> dict[str, object]:
        """Return the fields in the order of OpenAI's responses."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def new_identity(config: ServerConfig, response_id: str, kind: str, model: str) -> ResponseIdentity:
    """Return the identity of a response that is created now."""
    return ResponseIdentity(
        id=response_id,
        kind=kind,
        created=int(clock.to_wall_time(clock.now())),
        model=model,
        system_fingerprint=_fingerprint(config.engine, config.dtype),
    )


@functools.cache
def _fingerprint(engine: str, dtype: str) -> str:
    return f"tinkex-{package_version()}-{engine}-{dtype}"


def build_usage(usages: Iterable[Usage]) -> dict[str, object]:
    """Return the usage of a response: the sum over its prompts."""
    every = list(usages)
    num_prompt = sum(usage.num_prompt_tokens for usage in every)
    num_completion = sum(usage.num_completion_tokens for usage in every)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in every)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.num_reasoning_tokens for usage in every)
        },
    }


def tool_call_id(request_id: str, choice_index: int, call_index: int) -> str:
    """Return the id of a tool call, the same for a repeated request."""
    text = f"{request_id}:{choice_index}:{call_index}"
    return "call_" + blake2s(text.encode()).hexdigest()[:_TOOL_CALL_ID_CHARS]


def encode_event(content: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def encode_error(failure: Failure) -> bytes:
    """Return the last event of a stream that failed."""
    return encode_event(error_body(ApiFamily.OPENAI, failure, ""))
