"""OpenAI's completions of plain text or tokens, without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tinkex import clock
from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.inference.chat_prompts import check_text_length
from tinkex.server.inference.chat_request import SamplingSettings
from tinkex.server.inference.error_bodies import ApiFamily, invalid_value, unsupported_value
from tinkex.server.inference.inference_call import InferenceCall, InferenceResponse, InferenceRoute
from tinkex.server.inference.model_names import ModelSource, resolve_model
from tinkex.server.inference.openai_request import (
    CompletionRequest,
    parse_max_tokens,
    parse_sampling,
    parse_user,
)
from tinkex.server.inference.sample_jobs import SampleJob, SampleOptions, submit_sample
from tinkex.text import Tokenizer, encode
from tinkex.types import SampleResponse

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 512
MAX_TOTAL_CHOICES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """The sample of one prompt."""

    tokens: Sequence[int]
    job: SampleJob


async def completions(
    services: Services, call: InferenceCall[CompletionRequest]
) -> InferenceResponse:
    """Complete prompts."""
    request = call.request
    settings = _parse_settings(request)
    prompts = split_prompts(request)
    if len(prompts) * settings.num_choices > MAX_TOTAL_CHOICES:
        raise invalid_value("n", f"prompts times n may be at most {MAX_TOTAL_CHOICES}")
    async with services.tenant_slots.semaphore_for(call.tenant_id):
        source = await resolve_model(services, call.tenant_id, request.model)
        tokenizer, token_lists = await _tokenize(services, call, source, prompts)
        options = SampleOptions(idempotency_key=call.idempotency_key, user=parse_user(request))
        jobs = await asyncio.gather(
            *(
                submit_sample(services, call.identity, source, tokens, settings, options)
                for tokens in token_lists
            )
        )
    responses = await asyncio.gather(*(job.result() for job in jobs))
    body = await run_in_thread(_build_body, request, jobs, tokenizer, token_lists, responses)
    return RawResponse(body=body, headers={"x-request-id": jobs[0].id})


def _parse_settings(request: CompletionRequest) -> SamplingSettings:
    if request.suffix:
        raise unsupported_value("suffix", "suffix is not supported by this server; leave it out")
    num_choices = 1 if request.n is None else request.n
    if request.best_of not in {None, num_choices}:
        raise unsupported_value("best_of", "best_of must be equal to n")
    default = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    max_tokens = parse_max_tokens("max_tokens", default, 0 if request.echo else 1)
    return parse_sampling(request, max_tokens, request.logprobs)


def split_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts as texts or token ids; raises if there are too many."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise invalid_value("prompt", f"prompt has {len(given)} items; expected 1 to {MAX_PROMPTS}")
    prompts = [item for item in given if not isinstance(item, int)]
    if len({type(item) for item in given}) > 1:
        raise invalid_value("prompt", "prompt mixes texts and token ids")
    return prompts


async def _tokenize(
    services: Services,
    call: InferenceCall[CompletionRequest],
    source: ModelSource,
    prompts: Sequence[str | list[int]],
) -> tuple[Tokenizer, list[list[int]]]:
    adds_special = call.request.add_special_tokens is not False
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text_length(source.base, len(prompt))

    def tokenize() -> tuple[Tokenizer, list[list[int]]]:
        tokenizer = services.load_tokenizer(source.base)
        return tokenizer, [
            encode(tokenizer, prompt, adds_special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    return await services.text_threads.run(call.tenant_id, tokenize)


def _build_body(
    request: CompletionRequest,
    jobs: Sequence[SampleJob],
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[SampleResponse],
) -> bytes:
    choices: list[dict[str, object]] = []
    for response in responses:
        for sequence in response.sequences:
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            choice = {"index": len(choices), "text": text, "logprobs": None}
            choices.append(choice | {"finish_reason": sequence.stop_reason})
    num_prompt = sum(map(len, prompts))
    num_sampled = sum(len(each.tokens) for reply in responses for each in reply.sequences)
    body = {
        "id": f"cmpl-{jobs[0].id}",
        "object": "text_completion",
        "created": int(clock.now()),
        "model": request.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }
    return msgspec.json.encode(body)


ROUTES = (
    InferenceRoute(
        name="completions",
        method="POST",
        path="/completions",
        family=ApiFamily.OPENAI,
        handler=completions,
        request_type=CompletionRequest,
    ),
)
