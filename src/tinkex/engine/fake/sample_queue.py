"""Sample requests of the fake engine: first come, first served, one sequence at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.checkpoints.metadata import read_metadata
from tinkex.engine.examples import count_text_tokens
from tinkex.engine.fake.bigram import Bigram
from tinkex.engine.fake.sampler import BigramSampler, max_sampled_tokens
from tinkex.engine.fake.scripted import ScriptedText
from tinkex.engine.fake.storage import read_model
from tinkex.engine.fake.toy_tokenizer import VOCAB_SIZE
from tinkex.engine.protocol import (
    EngineFailure,
    FinishedSample,
    SampleProgress,
    SamplerSource,
)
from tinkex.engine.sample_watches import SampleWatches
from tinkex.engine.sampler_cache import CacheKey, SamplerCache
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types import SampledSequence, SampleRequest, SampleResponse

#: The time of one step; `step` returns what has finished by then.
STEP_SECONDS = 0.02
#: Context length for prompt and generated tokens.
MAX_CONTEXT_TOKENS = 32768
#: Maximum number of sequences of one request.
MAX_SEQUENCES = 1024
#: The number of checkpoints that stay in memory.
MAX_SAMPLERS = 64

_SYSTEM_RANDOM = random.SystemRandom()


class FakeSamplerCache:
    """Samplers of the base models and of recently used checkpoints."""

    def __init__(
        self, bases: Mapping[str, Bigram], texts: Mapping[str, ScriptedText] | None = None
    ) -> None:
        self._texts = texts or {}
        self._bases = {
            name: BigramSampler(model, self._texts.get(name)) for name, model in bases.items()
        }
        self._cache: SamplerCache[BigramSampler] = SamplerCache(MAX_SAMPLERS)

    def get_or_load(self, source: SamplerSource) -> BigramSampler:
        """Return the sampler of a source; raises InvalidInput or CheckpointError if it has none."""
        base = self._bases.get(source.base_model)
        if base is None:
            raise InvalidInput(
                f"base model {source.base_model!r} is not one of {', '.join(self._bases)}"
            )
        directory = source.directory
        if directory is None:
            return base

        def load(_key: CacheKey) -> tuple[BigramSampler, int]:
            saved_base = read_metadata(directory).base_model
            if saved_base != source.base_model:
                raise InvalidInput(
                    f"the weights are of base model {saved_base!r}, not of {source.base_model!r}"
                )
            model = read_model(directory, base.model.vocab_size)
            return BigramSampler(model, self._texts.get(source.base_model)), 1

        return self._cache.get_or_load(directory, load, source.key)

    def clear(self) -> None:
        """Drop all loaded checkpoints."""
        self._cache.clear()

    def __len__(self) -> int:
        return len(self._cache)


@dataclass(slots=True, eq=False)
class _QueuedSample:
    source: SamplerSource
    request: SampleRequest
    steps: Generator[None, None, SampleResponse] | None = None
    outcome: SampleResponse | EngineFailure | None = None
    """The outcome of a sample that is decoded a token at a time."""
    num_decoded: int = 0
    """The number of tokens of each sequence that count as decoded."""

    @property
    def sequences(self) -> Sequence[SampledSequence]:
        """The drawn sequences, of which only a part may count as decoded."""
        return self.outcome.sequences if isinstance(self.outcome, SampleResponse) else ()

    @property
    def is_decoded(self) -> bool:
        """Whether all tokens count as decoded."""
        return all(self.num_decoded >= len(sequence.tokens) for sequence in self.sequences)


class FakeSampleQueue:
    """All unfinished sample requests, oldest first."""

    def __init__(
        self,
        sampler_cache: FakeSamplerCache,
        sleep: Callable[[], None] | None = None,
        decode_sleep: Callable[[], None] | None = None,
    ) -> None:
        """`sleep` makes the engine slow: it is called before each request.

        `decode_sleep` is called before each token, and all requests advance together.
        """
        self._sampler_cache = sampler_cache
        self._sleep = sleep
        self._decode_sleep = decode_sleep
        self._queue: dict[str, _QueuedSample] = {}
        self.watches = SampleWatches()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        """Queue a request; a queued request with the same job id starts result."""
        self._queue[job_id] = _QueuedSample(source, request)

    def cancel(self, job_id: str) -> int:
        """Remove a request; returns the number of its decoded tokens, 0 for unknown ids."""
        self.watches.unwatch(job_id)
        sample = self._queue.pop(job_id, None)
        if sample is None:
            return 0
        return sum(min(sample.num_decoded, len(each.tokens)) for each in sample.sequences)

    def clear(self) -> None:
        """Remove all requests."""
        self._queue.clear()
        self.watches.clear()

    def watch(self, job_id: str) -> None:
        """Report a request from its first token on; unknown ids are ignored."""
        if job_id in self._queue:
            self.watches.watch(job_id)

    def progress(self) -> list[SampleProgress]:
        """Return the new tokens of watched requests."""
        found = []
        for job_id in self.watches.job_ids:
            sample = self._queue.get(job_id)
            if sample is None:
                self.watches.unwatch(job_id)
                continue
            lengths = (
                (index, min(sample.num_decoded, len(sequence.tokens)))
                for index, sequence in enumerate(sample.sequences)
            )
            found += [
                _describe_progress(job_id, sample.sequences[index], index, start, end)
                for index, start, end in self.watches.take_new(job_id, lengths)
            ]
        return found

    def step(self) -> list[FinishedSample]:
        """Work for a short time and return the finished requests.

        A slow engine sleeps and finishes exactly one request.
        """
        if self._sleep is not None and self._queue:
            self._sleep()
            return [self._finish_first()]
        if self._decode_sleep is not None and self._queue:
            self._decode_sleep()
            return self._decode_all()
        deadline = time.monotonic() + STEP_SECONDS
        finished: list[FinishedSample] = []
        while self._queue:
            result = self._advance_first()
            if result is not None:
                finished.append(result)
            if time.monotonic() >= deadline:
                break
        return finished

    def _decode_all(self) -> list[FinishedSample]:
        """Decode a token of every sequence of every request; return the finished requests."""
        finished = []
        for job_id, sample in list(self._queue.items()):
            while sample.outcome is None:
                sample.outcome = self._advance(sample)
            sample.num_decoded += 1
            if sample.is_decoded:
                del self._queue[job_id]
                finished.append(FinishedSample(job_id, sample.outcome))
        return finished

    def _finish_first(self) -> FinishedSample:
        while True:
            result = self._advance_first()
            if result is not None:
                return result

    def _advance_first(self) -> FinishedSample | None:
        """Draw one sequence of the oldest request; return its outcome if that was the last."""
        job_id, sample = next(iter(self._queue.items()))
        outcome = self._advance(sample)
        if outcome is None:
            return None
        del self._queue[job_id]
        return FinishedSample(job_id, outcome)

    def _advance(self, sample: _QueuedSample) -> SampleResponse | EngineFailure | None:
        try:
            if sample.steps is None:
                _check_sample(sample.request)
                sampler = self._sampler_cache.get_or_load(sample.source)
                sample.steps = sampler.start(sample.request, _SYSTEM_RANDOM)
            next(sample.steps)
        except StopIteration as end:
            response: SampleResponse = end.value
            return response
        except (InvalidInput, CheckpointError) as error:
            return EngineFailure(error.message, error.category)
        return None


def _describe_progress(
    job_id: str, sequence: SampledSequence, index: int, start: int, end: int
) -> SampleProgress:
    topk = sequence.topk_logprobs
    return SampleProgress(
        job_id,
        index,
        start,
        tuple(sequence.tokens[start:end]),
        tuple((sequence.logprobs or [])[start:end]),
        tuple(topk[start:end]) if topk else (),
    )


def _check_sample(request: SampleRequest) -> None:
    """Raise InvalidInput for a prompt that is too long or not text, or for too many results."""
    num_prompt = count_text_tokens("the prompt", request.prompt, MAX_CONTEXT_TOKENS)
    num_tokens = max_sampled_tokens(request.sampling_params)
    if num_prompt + num_tokens > MAX_CONTEXT_TOKENS:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and max_tokens is {num_tokens}; together they "
            f"may be at most {MAX_CONTEXT_TOKENS}"
        )
    _check_at_most("num_samples", request.num_samples, MAX_SEQUENCES)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_at_most(name, getattr(request, name), VOCAB_SIZE)


def _check_at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidInput(f"{name} is {value}; expected at most {limit}")
