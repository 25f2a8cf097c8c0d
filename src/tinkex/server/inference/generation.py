"""Generate answers: submit the sample of a prompt, and parse its tokens as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from tinkex.engine.protocol import SampleProgress
from tinkex.server.http.request_context import CallerIdentity, Services, run_in_thread
from tinkex.server.inference.answer_events import (
    AnswerEvent,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from tinkex.server.inference.answer_parser import AnswerParser
from tinkex.server.inference.chat_prompts import ChatPrompt, ReadRequest, render_chat_prompt
from tinkex.server.inference.chat_request import SamplingSettings
from tinkex.server.inference.model_names import ModelSource, resolve_model
from tinkex.server.inference.sample_jobs import SampleJob, SampleOptions, submit_sample
from tinkex.types import SampleResponse
from tinkex.types.sampling import SampledSequence, TopkRow


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of an answer, with the log-probabilities that were requested."""

    id: int
    logprob: float | None = None
    topk: TopkRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """The next part of one choice."""

    index: int
    events: Sequence[AnswerEvent]
    """May be empty: the text of tokens can be held back."""
    tokens: Sequence[SampledToken]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """The end of one choice."""

    index: int
    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop text or stop token that ended it; None for the end of the turn and the limit."""


GenerationEvent: TypeAlias = ChoiceDelta | ChoiceFinish
#: The text of more tokens than this is decoded on a thread.
MAX_INLINE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a finished generation, from its stored result."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A complete choice."""

    index: int
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    tokens: Sequence[SampledToken]
    finish_reason: FinishReason
    stop: str | int | None


class Generation:
    """The choices for one prompt; leave `events` early, or call `close`, to cancel it."""

    def __init__(
        self,
        job: SampleJob,
        sampling: SamplingSettings,
        new_parser: Callable[[], AnswerParser],
        *,
        num_prompt_tokens: int,
        first_index: int = 0,
    ) -> None:
        """`first_index` is the index of the first choice, if there are several prompts."""
        self.num_prompt_tokens = num_prompt_tokens
        self.usage = Usage(num_prompt_tokens=num_prompt_tokens)
        """Complete after the last event."""
        self.job = job
        self.sampling = sampling
        self._new_parser = new_parser
        self._first_index = first_index

    @property
    def request_id(self) -> str:
        """The id of the job."""
        return self.job.id

    async def events(self, *, is_live: bool = True) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the parts of all choices, as they are generated if `is_live`.

        The job is cancelled if this ends early.
        """
        parsers = [self._new_parser() for _ in range(self.sampling.num_choices)]
        try:
            async with aclosing(self.job.follow(is_live=is_live)) as parts:
                async for progress in parts:
                    yield await self._read_progress(progress, parsers[progress.sequence])
            response = await self.job.result()
            self.usage = self._count_usage(response, parsers)
            for sequence_no, parser in enumerate(parsers):
                index = self._first_index + sequence_no
                if events := parser.finish():
                    yield ChoiceDelta(index=index, events=events, tokens=())
                sequence = response.sequences[sequence_no]
                yield _describe_end(index, sequence, parser, self.sampling.stop_token_ids)
        finally:
            self.close()

    async def answer(self) -> list[Choice]:
        """Wait for all choices."""
        drafts = [_Draft(self._first_index + i) for i in range(self.sampling.num_choices)]
        async for event in self.events(is_live=False):
            drafts[event.index - self._first_index].add(event)
        return [draft.to_choice() for draft in drafts]

    def close(self) -> None:
        """Cancel the job unless it has finished, or was given a key to be repeated."""
        self.job.close()

    async def _read_progress(self, progress: SampleProgress, parser: AnswerParser) -> ChoiceDelta:
        if len(progress.tokens) > MAX_INLINE_TOKENS:
            events = await run_in_thread(parser.feed, progress.tokens)
        else:
            events = parser.feed(progress.tokens)
        index = self._first_index + progress.sequence
        return ChoiceDelta(index=index, events=events, tokens=_to_sampled_tokens(progress))

    def _count_usage(self, response: SampleResponse, parsers: Sequence[AnswerParser]) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=response.prompt_cache_hit_tokens,
            num_completion_tokens=sum(len(sequence.tokens) for sequence in response.sequences),
            num_reasoning_tokens=sum(parser.num_reasoning_tokens for parser in parsers),
        )


def _to_sampled_tokens(progress: SampleProgress) -> list[SampledToken]:
    num_tokens = len(progress.tokens)
    logprobs = progress.logprobs or (None,) * num_tokens
    topk = progress.topk or (None,) * num_tokens
    return [
        SampledToken(token, logprob, row)
        for token, logprob, row in zip(progress.tokens, logprobs, topk, strict=True)
    ]


def _describe_end(
    index: int, sequence: SampledSequence, parser: AnswerParser, stop_token_ids: Sequence[int]
) -> ChoiceFinish:
    """Return why a choice ended."""
    if parser.stop_text is not None:
        return ChoiceFinish(index=index, finish_reason="stop", stop=parser.stop_text)
    if sequence.stop_reason == "length" and not parser.is_finished:
        return ChoiceFinish(index=index, finish_reason="length")
    last = sequence.tokens[-1] if sequence.tokens else None
    stop = last if last in stop_token_ids else None
    reason: FinishReason = "tool_calls" if parser.has_tool_calls else "stop"
    return ChoiceFinish(index=index, finish_reason=reason, stop=stop)


@dataclass(slots=True)
class _Draft:
    """Collects the parts of one choice."""

    index: int
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish: ChoiceFinish | None = None

    def add(self, event: GenerationEvent) -> None:
        """Add the next part."""
        if isinstance(event, ChoiceFinish):
            self.finish = event
            return
        self.tokens.extend(event.tokens)
        for part in event.events:
            self._add_part(part)

    def _add_part(self, part: AnswerEvent) -> None:
        if isinstance(part, TextDelta):
            self.texts.append(part.text)
        elif isinstance(part, ReasoningDelta):
            self.reasoning.append(part.text)
        elif isinstance(part, ToolCallStart):
            self.names.append(part.name)
            self.arguments.append([])
        elif isinstance(part, ToolCallDelta):
            self.arguments[part.index].append(part.arguments)

    def to_choice(self) -> Choice:
        """Return the complete choice."""
        assert self.finish is not None
        calls = zip(self.names, self.arguments, strict=True)
        return Choice(
            index=self.index,
            text="".join(self.texts),
            reasoning="".join(self.reasoning),
            tool_calls=[ToolCall(name, "".join(parts)) for name, parts in calls],
            tokens=self.tokens,
            finish_reason=self.finish.finish_reason,
            stop=self.finish.stop,
        )


class ChatGeneration(Generation):
    """The choices for a conversation."""

    def __init__(self, job: SampleJob, source: ModelSource, prompt: ChatPrompt) -> None:
        super().__init__(
            job,
            prompt.request.sampling,
            prompt.new_parser,
            num_prompt_tokens=len(prompt.tokens),
        )
        self.request = prompt.request
        self.source = source
        self.prompt = prompt


async def start_generation(
    services: Services,
    caller: CallerIdentity,
    model: str,
    read: ReadRequest,
    *,
    idempotency_key: str = "",
) -> ChatGeneration:
    """Render a conversation and submit its sample; raises InferenceError for invalid requests."""
    source = await resolve_model(services, caller.tenant_id, model)
    prompt = await render_chat_prompt(services, caller.tenant_id, source, read)
    options = SampleOptions(idempotency_key=idempotency_key, user=prompt.request.user)
    job = await submit_sample(services, caller, source, prompt.tokens, prompt.sampling, options)
    return ChatGeneration(job, source, prompt)
