"""Write the answers of OpenAI's completions, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from tinkex.server.inference.answer_events import TextDelta
from tinkex.server.inference.answer_parser import AnswerParser
from tinkex.server.inference.chat_request import SamplingSettings
from tinkex.server.inference.generation import (
    Choice,
    ChoiceFinish,
    Generation,
    GenerationEvent,
    SampledToken,
)
from tinkex.server.inference.openai_answers import (
    DONE,
    ResponseIdentity,
    build_usage,
    encode_event,
)
from tinkex.server.inference.openai_logprobs import TextLogprobs, TokenNames
from tinkex.server.inference.openai_request import CompletionRequest
from tinkex.server.inference.sample_jobs import SampleJob
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.types import SampleResponse


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as tokens, and as text for `echo`."""

    tokens: Sequence[int]
    text: str


class TextGeneration(Generation):
    """The choices for one prompt."""

    def __init__(
        self,
        prompt: TextPrompt,
        job: SampleJob,
        sampling: SamplingSettings,
        new_parser: Callable[[], AnswerParser],
        *,
        first_index: int,
    ) -> None:
        super().__init__(
            job,
            sampling,
            new_parser,
            num_prompt_tokens=len(prompt.tokens),
            first_index=first_index,
        )
        self.prompt = prompt

    def scored_prompt(self) -> list[SampledToken]:
        """Return the prompt's tokens with their log-probabilities, when the result is known."""
        assert self.job.response is not None
        return _score_tokens(self.prompt.tokens, self.job.response)


def _score_tokens(tokens: Sequence[int], response: SampleResponse) -> list[SampledToken]:
    """Return the tokens of a prompt with their log-probabilities; the first has none."""
    logprobs = response.prompt_logprobs or [None] * len(tokens)
    topk = response.topk_prompt_logprobs or [None] * len(tokens)
    return [
        SampledToken(token, logprob, row)
        for token, logprob, row in zip(tokens, logprobs, topk, strict=True)
    ]


class CompletionWriter:
    """Writes the answer to one request."""

    def __init__(
        self,
        request: CompletionRequest,
        generations: Sequence[TextGeneration],
        identity: ResponseIdentity,
        texts: TokenTexts,
    ) -> None:
        self._request = request
        self._generations = generations
        self._identity = identity.to_json()
        self._sampling = generations[0].sampling
        self._names = TokenNames(texts, are_ids=bool(request.return_tokens_as_token_ids))
        self._has_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs: dict[int, TextLogprobs] = {}
        """By choice, as soon as it has started."""
        self._unsent: dict[int, list[SampledToken]] = {}

    def close(self) -> None:
        """Cancel what has not finished."""
        for generation in self._generations:
            generation.close()

    def _generation_of(self, index: int) -> TextGeneration:
        return self._generations[index // self._sampling.num_choices]

    # --- whole -------------------------------------------------------------------------------
    async def collect(self) -> list[Choice]:
        """Wait for the choices of all prompts; the first failure cancels the others."""
        tasks = [asyncio.ensure_future(each.answer()) for each in self._generations]
        try:
            return [choice for choices in await asyncio.gather(*tasks) for choice in choices]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.close()

    def build_body(self, choices: Sequence[Choice]) -> bytes:
        """Return the complete response."""
        body = dict(self._identity)
        # One after the other: log-probabilities are much larger as objects than as JSON.
        body["choices"] = [
            msgspec.Raw(msgspec.json.encode(self._build_choice(choice))) for choice in choices
        ]
        body["usage"] = build_usage(each.usage for each in self._generations)
        return msgspec.json.encode(body)

    def _build_choice(self, choice: Choice) -> dict[str, object]:
        self._logprobs[choice.index] = self._new_logprobs(choice.index)
        text, tokens = self._echo(choice.index)
        return {
            "index": choice.index,
            "text": text + choice.text,
            **self._describe_tokens(choice.index, [*tokens, *choice.tokens]),
            **self._describe_prompt(choice.index),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }

    def _new_logprobs(self, index: int) -> TextLogprobs:
        prompt = self._generation_of(index).prompt.tokens
        context = () if self._request.echo else prompt
        return TextLogprobs(self._names, self._sampling.num_top_logprobs, context)

    def _echo(self, index: int) -> tuple[str, list[SampledToken]]:
        """Return the text of the prompt and its tokens, if they are part of the answer."""
        if not self._request.echo:
            return "", []
        generation = self._generation_of(index)
        if not self._sampling.has_logprobs:
            return generation.prompt.text, [SampledToken(id) for id in generation.prompt.tokens]
        return generation.prompt.text, generation.scored_prompt()

    def _describe_tokens(self, index: int, tokens: Sequence[SampledToken]) -> dict[str, object]:
        logprobs = None
        if self._sampling.has_logprobs and tokens:
            logprobs = self._logprobs[index].build(tokens)
        described: dict[str, object] = {"logprobs": logprobs}
        if self._request.return_token_ids:
            described["token_ids"] = [token.id for token in tokens]
        return described

    def _describe_prompt(self, index: int) -> dict[str, object]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._generation_of(index).prompt.tokens)}

    # --- streamed ----------------------------------------------------------------------------
    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; those of one step of a choice together."""
        if self._request.echo and self._sampling.has_logprobs:
            # The log-probabilities of prompts, which come first, are part of the results.
            await asyncio.gather(*(each.job.result() for each in self._generations))
        async with aclosing(merge_events(self._generations)) as events:
            async for event in events:
                if encoded := self._encode(event):
                    yield encoded
        if self._has_usage:
            usage = build_usage(each.usage for each in self._generations)
            yield encode_event({**self._identity, "choices": [], "usage": usage})
        yield DONE

    def _encode(self, event: GenerationEvent) -> bytes:
        index, encoded = event.index, []
        if index not in self._logprobs:
            self._logprobs[index] = self._new_logprobs(index)
            text, self._unsent[index] = self._echo(index)
            if self._request.echo:
                encoded.append(self._encode_chunk(index, text, self._describe_prompt(index)))
        if isinstance(event, ChoiceFinish):
            finish = {"finish_reason": event.finish_reason, "stop_reason": event.stop}
            encoded.append(self._encode_chunk(index, "", finish))
            return b"".join(encoded)
        self._unsent[index].extend(event.tokens)
        text = "".join(part.text for part in event.events if isinstance(part, TextDelta))
        if text:
            encoded.append(self._encode_chunk(index, text, {}))
        return b"".join(encoded)

    def _encode_chunk(self, index: int, text: str, more: Mapping[str, object]) -> bytes:
        tokens, self._unsent[index] = self._unsent[index], []
        choice = {
            "index": index,
            "text": text,
            **self._describe_tokens(index, tokens),
            "finish_reason": None,
            **more,
        }
        chunk = {**self._identity, "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = None
        return encode_event(chunk)


async def merge_events(
    generations: Sequence[Generation],
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events of several generations as they come; the first failure ends all."""
    if len(generations) == 1:
        async with aclosing(generations[0].events()) as events:
            async for event in events:
                yield event
        return
    # Not bounded: the tokens of all choices are in memory in any case.
    queue: asyncio.Queue[GenerationEvent | asyncio.Future[None]] = asyncio.Queue()

    async def forward(generation: Generation) -> None:
        async with aclosing(generation.events()) as events:
            async for event in events:
                queue.put_nowait(event)

    tasks = [asyncio.ensure_future(forward(each)) for each in generations]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, asyncio.Future):
                item.result()
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
