"""OpenAI's chat completions, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import msgspec

from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.inference.answer_events import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from tinkex.server.inference.error_bodies import ApiFamily
from tinkex.server.inference.generation import (
    ChatGeneration,
    Choice,
    ChoiceFinish,
    GenerationEvent,
    SampledToken,
    start_generation,
)
from tinkex.server.inference.inference_call import (
    EventStream,
    InferenceCall,
    InferenceResponse,
    InferenceRoute,
)
from tinkex.server.inference.openai_answers import (
    DONE,
    KEEP_ALIVE,
    ResponseIdentity,
    build_usage,
    encode_error,
    encode_event,
    new_identity,
    tool_call_id,
)
from tinkex.server.inference.openai_logprobs import TokenNames, chat_logprobs
from tinkex.server.inference.openai_messages import to_chat_request
from tinkex.server.inference.openai_request import ChatCompletionRequest


async def chat_completions(
    services: Services, call: InferenceCall[ChatCompletionRequest]
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
    request_id = generation.request_id
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    identity = new_identity(services.config, f"chatcmpl-{request_id}", kind, request.model)
    writer = ChatWriter(request, generation, identity)
    headers = {"x-request-id": request_id}
    if request.stream:
        return EventStream(
            chunks=writer.chunks(),
            keep_alive=KEEP_ALIVE,
            encode_error=encode_error,
            headers=headers,
            close=generation.close,
        )
    choices = await generation.answer()
    return RawResponse(body=await run_in_thread(writer.build_body, choices), headers=headers)


class ChatWriter:
    """Writes the answer to one request."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        generation: ChatGeneration,
        identity: ResponseIdentity,
    ) -> None:
        self._request = request
        self._generation = generation
        self._identity = identity.to_json()
        self._names = TokenNames(
            generation.prompt.texts, are_ids=bool(request.return_tokens_as_token_ids)
        )
        self._has_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._unsent: dict[int, list[SampledToken]] = {}
        """Tokens of each started choice that no chunk has described yet."""

    # --- whole -------------------------------------------------------------------------------
    def build_body(self, choices: Sequence[Choice]) -> bytes:
        """Return the complete response."""
        body = dict(self._identity)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._generation.prompt.tokens)
        # One after the other: log-probabilities are much larger as objects than as JSON.
        body["choices"] = [
            msgspec.Raw(msgspec.json.encode(self._build_choice(choice))) for choice in choices
        ]
        body["usage"] = build_usage([self._generation.usage])
        return msgspec.json.encode(body)

    def _build_choice(self, choice: Choice) -> dict[str, object]:
        calls = [
            {
                "id": tool_call_id(self._generation.request_id, choice.index, call_index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_index, call in enumerate(choice.tool_calls)
        ]
        content = None if calls and not choice.text else choice.text
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            **self._describe_tokens(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }

    def _describe_tokens(self, tokens: Sequence[SampledToken]) -> dict[str, object]:
        sampling = self._generation.sampling
        logprobs = None
        if sampling.has_logprobs and tokens:
            logprobs = chat_logprobs(self._names, tokens, sampling.num_top_logprobs)
        described: dict[str, object] = {"logprobs": logprobs}
        if self._request.return_token_ids:
            described["token_ids"] = [token.id for token in tokens]
        return described

    # --- streamed ----------------------------------------------------------------------------
    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; those of one step of a choice together."""
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                if encoded := self._encode(event):
                    yield encoded
        if self._has_usage:
            usage = build_usage([self._generation.usage])
            yield encode_event({**self._identity, "choices": [], "usage": usage})
        yield DONE

    def _encode(self, event: GenerationEvent) -> bytes:
        encoded = self._start_choice(event.index)
        if isinstance(event, ChoiceFinish):
            encoded.append(self._encode_finish(event))
            return b"".join(encoded)
        self._unsent[event.index].extend(event.tokens)
        deltas = [self._build_delta(event.index, part) for part in event.events]
        encoded += [self._encode_chunk(event.index, delta) for delta in deltas if delta]
        return b"".join(encoded)

    def _start_choice(self, index: int) -> list[bytes]:
        """Return the chunk with the role, unless the choice has started."""
        if index in self._unsent:
            return []
        self._unsent[index] = []
        return [self._encode_chunk(index, {"role": "assistant", "content": ""})]

    def _build_delta(self, index: int, event: AnswerEvent) -> dict[str, object] | None:
        if isinstance(event, TextDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text}
        if isinstance(event, ToolCallStart):
            call: dict[str, object] = {
                "index": event.index,
                "id": tool_call_id(self._generation.request_id, index, event.index),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        if isinstance(event, ToolCallDelta):
            call = {"index": event.index, "function": {"arguments": event.arguments}}
            return {"tool_calls": [call]}
        return None

    def _encode_finish(self, event: ChoiceFinish) -> bytes:
        finish = {"finish_reason": event.finish_reason, "stop_reason": event.stop}
        return self._encode_chunk(event.index, {}, finish)

    def _encode_chunk(
        self, index: int, delta: dict[str, object], finish: Mapping[str, object] | None = None
    ) -> bytes:
        tokens, self._unsent[index] = self._unsent[index], []
        choice = {
            "index": index,
            "delta": delta,
            **self._describe_tokens(tokens),
            **(finish or {"finish_reason": None}),
        }
        chunk = {**self._identity, "choices": [choice]}
        if self._request.return_token_ids and "role" in delta:
            chunk["prompt_token_ids"] = list(self._generation.prompt.tokens)
        if self._has_usage:
            chunk["usage"] = None
        return encode_event(chunk)


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
