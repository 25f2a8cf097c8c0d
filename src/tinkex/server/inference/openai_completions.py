"""OpenAI's completions of texts or tokens, without a chat template: prompts and their samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.inference.answer_parser import AnswerParser
from tinkex.server.inference.chat_prompts import check_text_length, texts_of
from tinkex.server.inference.chat_request import SamplingSettings
from tinkex.server.inference.completion_writer import CompletionWriter, TextGeneration, TextPrompt
from tinkex.server.inference.error_bodies import ApiFamily, invalid_value, unsupported_value
from tinkex.server.inference.inference_call import (
    EventStream,
    InferenceCall,
    InferenceResponse,
    InferenceRoute,
)
from tinkex.server.inference.model_names import ModelSource, resolve_model
from tinkex.server.inference.openai_answers import KEEP_ALIVE, encode_error, new_identity
from tinkex.server.inference.openai_request import (
    MAX_TOKEN,
    CompletionRequest,
    parse_max_tokens,
    parse_sampling,
    parse_user,
)
from tinkex.server.inference.sample_jobs import SampleOptions, submit_sample
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.text import encode

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 512
MAX_TOTAL_CHOICES = 2048
#: Maximum tokens of prompts in one answer, with the likely ones at each position: they take up to
#: 30 bytes of JSON each.
MAX_REPEATED_TOKENS = 4_000_000


async def completions(
    services: Services, call: InferenceCall[CompletionRequest]
) -> InferenceResponse:
    """Complete prompts."""
    request = call.request
    sampling = _parse_settings(request)
    source = await resolve_model(services, call.tenant_id, request.model)
    texts, prompts = await _tokenize(services, call, source, sampling)
    generations = await _submit_all(services, call, source, sampling, texts, prompts)
    request_id = generations[0].request_id
    identity = new_identity(services.config, f"cmpl-{request_id}", "text_completion", request.model)
    writer = CompletionWriter(request, generations, identity, texts)
    headers = {"x-request-id": request_id}
    if request.stream:
        return EventStream(
            chunks=writer.chunks(),
            keep_alive=KEEP_ALIVE,
            encode_error=encode_error,
            headers=headers,
            close=writer.close,
        )
    choices = await writer.collect()
    return RawResponse(body=await run_in_thread(writer.build_body, choices), headers=headers)


def _parse_settings(request: CompletionRequest) -> SamplingSettings:
    if request.suffix:
        raise unsupported_value("suffix", "suffix is not supported by this server; leave it out")
    if request.best_of not in {None, 1 if request.n is None else request.n}:
        raise unsupported_value("best_of", "best_of must be equal to n")
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return parse_sampling(
        request,
        parse_max_tokens("max_tokens", max_tokens, 0 if request.echo else 1),
        request.logprobs,
        "logprobs",
    )


def split_prompts(request: CompletionRequest, num_choices: int) -> list[str | list[int]]:
    """Return the prompts as texts or token ids; raises if there are too many."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [_check_tokens([item for item in given if isinstance(item, int)])]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise invalid_value("prompt", f"prompt has {len(given)} items; expected 1 to {MAX_PROMPTS}")
    if len({type(item) for item in given}) > 1:
        raise invalid_value("prompt", "prompt mixes texts and token ids; send one kind")
    if len(given) * num_choices > MAX_TOTAL_CHOICES:
        raise invalid_value(
            "n",
            f"{len(given)} prompts with n = {num_choices} have too many choices; expected at "
            f"most {MAX_TOTAL_CHOICES}",
        )
    return [
        _check_tokens(item) if isinstance(item, list) else item
        for item in given
        if not isinstance(item, int)
    ]


def _check_tokens(tokens: list[int]) -> list[int]:
    if not tokens or min(tokens) < 0 or max(tokens) > MAX_TOKEN:
        raise invalid_value("prompt", f"a prompt needs token ids from 0 to {MAX_TOKEN}")
    return tokens


async def _tokenize(
    services: Services,
    call: InferenceCall[CompletionRequest],
    source: ModelSource,
    sampling: SamplingSettings,
) -> tuple[TokenTexts, list[TextPrompt]]:
    """Read the prompts, on a thread: there may be millions of token ids."""
    request = call.request
    adds_special = request.add_special_tokens is not False

    def tokenize() -> tuple[TokenTexts, list[TextPrompt]]:
        given = split_prompts(request, sampling.num_choices)
        check_text_length(source.base, max(map(len, given)), "prompt")
        tokenizer = services.load_tokenizer(source.base)
        texts = texts_of(tokenizer)
        prompts = [
            TextPrompt(encode(tokenizer, prompt, adds_special), prompt)
            if isinstance(prompt, str)
            else TextPrompt(prompt, tokenizer.decode(prompt) if request.echo else "")
            for prompt in given
        ]
        if request.echo or request.return_token_ids:
            _check_repeated([len(prompt.tokens) for prompt in prompts], sampling)
        return texts, prompts

    return await services.text_threads.run(call.tenant_id, tokenize)


def _check_repeated(lengths: Sequence[int], sampling: SamplingSettings) -> None:
    """Raise if an answer would be too large: each of its choices repeats the prompt."""
    count = sum(lengths) * sampling.num_choices * (sampling.num_top_logprobs + 1)
    if count > MAX_REPEATED_TOKENS:
        raise invalid_value(
            "n",
            f"n = {sampling.num_choices} with logprobs = {sampling.num_top_logprobs} repeats "
            f"{count} tokens of the prompts in the answer; expected at most "
            f"{MAX_REPEATED_TOKENS}: send fewer prompts at once, or a smaller n or logprobs",
        )


async def _submit_all(
    services: Services,
    call: InferenceCall[CompletionRequest],
    source: ModelSource,
    sampling: SamplingSettings,
    texts: TokenTexts,
    prompts: Sequence[TextPrompt],
) -> list[TextGeneration]:
    """Submit a sample per prompt; if one is refused, the others are cancelled."""
    request, key = call.request, call.idempotency_key
    has_scores = bool(request.echo) and sampling.has_logprobs

    async def submit(number: int, prompt: TextPrompt) -> TextGeneration:
        options = SampleOptions(
            prompt_field="prompt",
            has_prompt_logprobs=has_scores,
            num_top_prompt_logprobs=sampling.num_top_logprobs if has_scores else 0,
            idempotency_key=f"{key}:{number}" if key and number else key,
            user=parse_user(request) if number == 0 else None,
        )
        job = await submit_sample(services, call.identity, source, prompt.tokens, sampling, options)
        return TextGeneration(
            prompt,
            job,
            sampling,
            lambda: AnswerParser(texts, sampling.stop, context=prompt.tokens),
            first_index=number * sampling.num_choices,
        )

    tasks = [asyncio.ensure_future(submit(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                task.result().close()
        raise


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
