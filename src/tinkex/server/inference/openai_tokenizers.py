"""Tokenizers of models for remote clients, in the form of vLLM: texts to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tinkex.server.http.request_context import RawResponse, Services
from tinkex.server.http.store_access import read
from tinkex.server.inference.chat_prompts import (
    check_text_length,
    render_chat_prompt,
    texts_of,
)
from tinkex.server.inference.error_bodies import ApiFamily, invalid_value
from tinkex.server.inference.inference_call import InferenceCall, InferenceRoute
from tinkex.server.inference.model_names import ModelSource, list_sampleable, resolve_model
from tinkex.server.inference.openai_messages import to_chat_request
from tinkex.server.inference.openai_request import MAX_TOKEN, ChatCompletionRequest
from tinkex.text import Tokenizer, encode

MAX_DETOKENIZED = 1_000_000


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens."""

    model: str | None = None
    tokens: list[int]


async def tokenize(services: Services, call: InferenceCall[TokenizeRequest]) -> RawResponse:
    """Return the tokens of a text or of a conversation."""
    request = call.request
    source = await _find_model(services, call, request.model)
    if (request.prompt is None) is (request.messages is None):
        raise invalid_value("prompt", "give either prompt or messages")
    if request.prompt is None:
        tokens = await _render(services, call, source)
    else:
        tokens = await _encode(services, call, source, request.prompt)

    def describe() -> bytes:
        body: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": source.base.max_context_tokens,
            "tokens": tokens,
        }
        if request.return_token_strs:
            texts = texts_of(services.load_tokenizer(source.base))
            body["token_strs"] = [texts.text_of(token) for token in tokens]
        return msgspec.json.encode(body)

    return RawResponse(body=await services.text_threads.run(call.tenant_id, describe))


async def detokenize(services: Services, call: InferenceCall[DetokenizeRequest]) -> RawResponse:
    """Return the text of tokens, with special tokens."""
    source = await _find_model(services, call, call.request.model)

    def decode() -> str:
        tokens = call.request.tokens
        _check_tokens(tokens, source.base.vocab_size)
        return services.load_tokenizer(source.base).decode(tokens)

    text = await services.text_threads.run(call.tenant_id, decode)
    return RawResponse(body=msgspec.json.encode({"prompt": text}))


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if len(tokens) > MAX_DETOKENIZED:
        raise invalid_value("tokens", f"expected at most {MAX_DETOKENIZED} tokens")
    if tokens and not 0 <= min(tokens) <= max(tokens) <= MAX_TOKEN:
        raise invalid_value("tokens", f"token ids are from 0 to {MAX_TOKEN}")
    if vocab_size and max(tokens, default=0) >= vocab_size:
        raise invalid_value("tokens", f"the vocabulary of this model has {vocab_size} tokens")


async def tokenizer_info(services: Services, call: InferenceCall[None]) -> RawResponse:
    """Describe the tokenizer of a model: its special tokens and its chat template."""
    source = await _find_model(services, call, call.query.get("model"))
    tokenizer = await _load(services, call, source)
    info = {
        "tokenizer_class": type(tokenizer).__name__,
        "max_model_len": source.base.max_context_tokens,
        "vocab_size": source.base.vocab_size,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = getattr(tokenizer, name, None)
        info[name] = None if token is None else str(token)
        info[f"{name}_id"] = getattr(tokenizer, f"{name}_id", None)
    return RawResponse(body=msgspec.json.encode(info))


async def _find_model(
    services: Services, call: InferenceCall[object], name: str | None
) -> ModelSource:
    """Find the model of a request; without a name, the only base model."""
    if name is not None:
        return await resolve_model(services, call.tenant_id, name)
    served = await read(services, list_sampleable)
    if len(served) != 1:
        names = ", ".join(model.name for model in served)
        raise invalid_value("model", f"name a model; this server has: {names[:500]}")
    return ModelSource(requested=served[0].name, base=served[0])


async def _load(services: Services, call: InferenceCall[object], source: ModelSource) -> Tokenizer:
    return await services.text_threads.run(
        call.tenant_id, lambda: services.load_tokenizer(source.base)
    )


async def _encode(
    services: Services, call: InferenceCall[TokenizeRequest], source: ModelSource, text: str
) -> list[int]:
    check_text_length(source.base, len(text))

    def run() -> list[int]:
        tokenizer = services.load_tokenizer(source.base)
        return encode(tokenizer, text, call.request.add_special_tokens)

    return await services.text_threads.run(call.tenant_id, run)


async def _render(
    services: Services, call: InferenceCall[TokenizeRequest], source: ModelSource
) -> list[int]:
    request = call.request
    chat = ChatCompletionRequest(
        model=source.requested,
        messages=request.messages or [],
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
    )
    prompt = await render_chat_prompt(
        services, call.tenant_id, source, lambda: to_chat_request(chat)
    )
    return list(prompt.tokens)


ROUTES = (
    InferenceRoute(
        name="tokenize",
        method="POST",
        path="/tokenize",
        family=ApiFamily.OPENAI,
        handler=tokenize,
        request_type=TokenizeRequest,
        is_rooted=True,
    ),
    InferenceRoute(
        name="detokenize",
        method="POST",
        path="/detokenize",
        family=ApiFamily.OPENAI,
        handler=detokenize,
        request_type=DetokenizeRequest,
        is_rooted=True,
    ),
    InferenceRoute(
        name="tokenizer_info",
        method="GET",
        path="/tokenizer_info",
        family=ApiFamily.OPENAI,
        handler=tokenizer_info,
        is_rooted=True,
    ),
)
