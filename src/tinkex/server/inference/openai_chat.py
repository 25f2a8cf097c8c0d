"""OpenAI's chat completions."""

from __future__ import annotations

import msgspec

from tinkex import clock
from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.inference.chat_request import ChatRequest
from tinkex.server.inference.error_bodies import ApiFamily
from tinkex.server.inference.generation import (
    Choice,
    Generation,
    Usage,
    start_generation,
)
from tinkex.server.inference.inference_call import InferenceCall, InferenceResponse, InferenceRoute
from tinkex.server.inference.openai_messages import to_chat_request
from tinkex.server.inference.openai_request import ChatCompletionRequest


async def chat_completions(
    services: Services, call: InferenceCall[ChatCompletionRequest]
) -> InferenceResponse:
    """Continue a conversation."""
    request = to_chat_request(call.request)
    generation = await start_generation(
        services, call.identity, request, idempotency_key=call.idempotency_key
    )
    choices = await generation.answer()
    body = await run_in_thread(_build_body, generation, request, choices)
    return RawResponse(body=body, headers={"x-request-id": generation.request_id})


def _build_body(generation: Generation, request: ChatRequest, choices: list[Choice]) -> bytes:
    body = {
        "id": f"chatcmpl-{generation.request_id}",
        "object": "chat.completion",
        "created": int(clock.now()),
        "model": request.model,
        "choices": [_build_choice(choice) for choice in choices],
        "usage": build_usage(generation.usage),
    }
    return msgspec.json.encode(body)


def _build_choice(choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop,
    }


def build_usage(usage: Usage) -> dict[str, object]:
    """Return the usage of a response."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


ROUTES = (
    InferenceRoute(
        name="chat_completions",
        method="POST",
        path="/chat/completions",
        family=ApiFamily.OPENAI,
        handler=chat_completions,
        request_type=ChatCompletionRequest,
    ),
)
