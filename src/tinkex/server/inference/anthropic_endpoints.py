"""Anthropic's Messages API: messages and the counting of their tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec

from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.inference.anthropic_messages import omits_thinking, to_chat_request
from tinkex.server.inference.anthropic_request import CountTokensRequest, MessagesRequest
from tinkex.server.inference.anthropic_stream import (
    PING,
    MessageStream,
    StopDetails,
    StreamEvent,
    build_message,
    encode_event,
    encode_events,
)
from tinkex.server.inference.chat_prompts import render_chat_prompt
from tinkex.server.inference.error_bodies import ApiFamily, Failure, error_body
from tinkex.server.inference.generation import (
    ChatGeneration,
    ChoiceDelta,
    ChoiceFinish,
    start_generation,
)
from tinkex.server.inference.inference_call import (
    EventStream,
    InferenceCall,
    InferenceResponse,
    InferenceRoute,
)
from tinkex.server.inference.model_names import resolve_model


async def create_message(
    services: Services, call: InferenceCall[MessagesRequest]
) -> InferenceResponse:
    """Continue a conversation."""
    request = call.request
    generation = await start_generation(
        services,
        call.identity,
        request.model,
        lambda: to_chat_request(request),
        idempotency_key=call.idempotency_key,
    )
    stream = MessageStream(
        generation.request_id, request.model, omits_thinking=omits_thinking(request)
    )
    headers = {"request-id": generation.request_id}
    if request.stream:
        return _event_stream(generation, stream, headers)
    parts = _stream_parts(generation, stream, is_live=False)
    events = [event async for part in parts for event in part]
    body = await run_in_thread(lambda: msgspec.json.encode(build_message(events)))
    return RawResponse(body=body, headers=headers)


def _event_stream(
    generation: ChatGeneration, stream: MessageStream, headers: Mapping[str, str]
) -> EventStream:
    async def encode_parts() -> AsyncGenerator[bytes, None]:
        async with aclosing(_stream_parts(generation, stream, is_live=True)) as parts:
            async for part in parts:
                yield encode_events(part)

    def encode_error(failure: Failure) -> bytes:
        return encode_event(error_body(ApiFamily.ANTHROPIC, failure, generation.request_id))

    return EventStream(
        chunks=encode_parts(),
        keep_alive=encode_event(PING),
        encode_error=encode_error,
        close=generation.close,
        headers=headers,
    )


async def _stream_parts(
    generation: ChatGeneration, stream: MessageStream, *, is_live: bool
) -> AsyncGenerator[list[StreamEvent], None]:
    """Yield the stream events of an answer, together if they belong to the same tokens."""
    pending = stream.start(generation.num_prompt_tokens)
    async with aclosing(generation.events(is_live=is_live)) as events:
        async for event in events:
            if isinstance(event, ChoiceDelta):
                pending += stream.feed(event.events)
            else:
                pending += stream.finish(_stop_details(generation, event), generation.usage)
            if pending:
                yield pending
            pending = []


def _stop_details(generation: ChatGeneration, finish: ChoiceFinish) -> StopDetails:
    usage, limit = generation.usage, generation.request.sampling.max_tokens
    num_tokens = usage.num_prompt_tokens + usage.num_completion_tokens
    is_full = num_tokens >= generation.source.base.max_context_tokens
    return StopDetails(
        finish_reason=finish.finish_reason,
        stop=finish.stop,
        is_context_full=is_full and (limit is None or usage.num_completion_tokens < limit),
    )


async def count_tokens(
    services: Services, call: InferenceCall[CountTokensRequest]
) -> InferenceResponse:
    """Count the tokens of a conversation without continuing it."""
    source = await resolve_model(services, call.tenant_id, call.request.model)
    prompt = await render_chat_prompt(
        services, call.tenant_id, source, lambda: to_chat_request(call.request)
    )
    return RawResponse(body=msgspec.json.encode({"input_tokens": len(prompt.tokens)}))


ROUTES = (
    InferenceRoute(
        name="messages",
        method="POST",
        path="/messages",
        family=ApiFamily.ANTHROPIC,
        handler=create_message,
        request_type=MessagesRequest,
    ),
    InferenceRoute(
        name="count_tokens",
        method="POST",
        path="/messages/count_tokens",
        family=ApiFamily.ANTHROPIC,
        handler=count_tokens,
        request_type=CountTokensRequest,
    ),
)
