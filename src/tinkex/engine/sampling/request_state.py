"""Weights to sample with, on top of a base model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tinkex.engine.sampling.request import SampleSpec, Tokens
from tinkex.engine.sampling.stop_conditions import StopTextMatcher, TextDecoder
from tinkex.engine.sampling.token_sampler import RandomStream
from tinkex.nn.lora_decode import DecodeLoraPairs, build_decode_pairs
from tinkex.nn.lora_layout import LoraPair
from tinkex.types import SampledSequence, SampleResponse
from tinkex.types.sampling import FILLER_LOGPROB, StopReason, TopkLogprobs

if TYPE_CHECKING:
    from tinkex.engine.sampling.prompt_logprobs import PromptLogprobs
    from tinkex.nn.kv_cache import PromptKV


@dataclass(frozen=True, slots=True, eq=False)
class SamplerAdapter:
    """An adapter's pairs; they must not change while it is sampled from."""

    key: Hashable
    """Equal keys mean equal weights: what was computed with one holds for the other."""
    scale: float
    """What the low-rank part is multiplied by."""
    weights: Sequence[LoraPair | None] = field(repr=False)
    """The pairs by site."""
    dtype: torch.dtype = torch.float32
    """What the base model computes with."""
    pairs: DecodeLoraPairs = field(init=False, repr=False)
    """The pairs again, ready to be added to rows."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", build_decode_pairs(self.weights, self.scale, self.dtype))

    @property
    def num_bytes(self) -> int:
        """How much memory the pairs take that are ready, beside the weights themselves."""
        return sum(pair.num_bytes for pair in self.pairs if pair is not None)


Floats = npt.NDArray[np.float32]
TopkRow = tuple[npt.NDArray[np.int32], Floats]


class SequenceState:
    """One sample of a request."""

    __slots__ = (
        "_stop_matcher",
        "_topk",
        "index",
        "logprobs",
        "random_stream",
        "request",
        "spec",
        "stop_reason",
        "tokens",
    )

    def __init__(self, request: RequestState, index: int, decoder: TextDecoder | None) -> None:
        ask = request.spec
        self.request = request
        self.spec = ask
        self.index = index
        """Which of the request's samples it is."""
        self.random_stream = RandomStream(ask.seed, index)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None
        """Why it is over; None while it is not."""
        self._topk: list[TopkRow] = []
        self._stop_matcher = (
            StopTextMatcher(decoder, ask.stops.texts) if decoder and ask.stops.texts else None
        )

    def append_token(self, token: int, logprob: float, topk: TopkRow | None = None) -> bool:
        """Add a token that was drawn; whether the sequence is over."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        if token in self.spec.stops.tokens or (
            self._stop_matcher and self._stop_matcher.matches_after(token)
        ):
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.spec.max_tokens:
            self.stop_reason = "length"
        return self.stop_reason is not None

    @property
    def arrival_order(self) -> tuple[int, int]:
        """Lower came first."""
        return self.request.arrival, self.index

    @property
    def all_tokens(self) -> npt.NDArray[np.int64]:
        """The prompt and all that was drawn."""
        return np.concatenate([self.spec.prompt, np.array(self.tokens, dtype=np.int64)])

    def result(self) -> SampledSequence:
        """What is answered."""
        assert self.stop_reason is not None
        return SampledSequence(
            self.stop_reason,
            "",
            np.array(self.tokens, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            stack_topk(self._topk) if self.spec.num_topk > 0 else None,
        )


class PrefillProgress:
    """Tokens that are being read, so that samples can go on from there."""

    def __init__(
        self, request: RequestState, tokens: Tokens, prompt_kv: PromptKV, num_computed: int
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.prompt_kv = prompt_kv
        self.num_computed = num_computed

    @property
    def num_remaining(self) -> int:
        """How many tokens are still to be read."""
        return len(self.tokens) - self.num_computed


class RequestState:
    """One request: its samples that wait, run and are over."""

    def __init__(
        self,
        job_id: str,
        arrival: int,
        adapter: SamplerAdapter | None,
        spec: SampleSpec,
        *,
        tenant_id: str = "",
    ) -> None:
        self.job_id = job_id
        self.arrival = arrival
        """Lower numbers came first."""
        self.adapter = adapter
        self.spec = spec
        self.tenant_id = tenant_id
        """Whose prompts may be recognised in this one's."""
        self.is_bulk = False
        """Whether it runs with those of tenants that have many sequences."""
        self.unstarted: list[SequenceState] = []
        """Samples that have not begun; they begin where the prompt ends."""
        self.preempted: list[SequenceState] = []
        """Samples that had to make room; they go on where they were."""
        self.running: set[SequenceState] = set()
        """Samples that take steps."""
        self.prefill: PrefillProgress | None = None
        """What is being read for this request."""
        self.prompt_kv: PromptKV | None = None
        """What was read, while samples wait to go on from its end."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """What was found out about the prompt."""
        self.num_cached_tokens = 0
        """How many tokens of the prompt needed no reading."""
        self._results: dict[int, SampledSequence] = {}

    @property
    def adapter_key(self) -> Hashable:
        """Which weights it is sampled with."""
        return self.adapter.key if self.adapter is not None else None

    @property
    def prefix_key(self) -> Hashable:
        """With which other requests it may share what is read."""
        return self.tenant_id, self.adapter_key

    @property
    def is_active(self) -> bool:
        """Whether it has a part in passes now, or holds memory."""
        return bool(self.running or self.prefill or self.prompt_kv)

    @property
    def num_unfinished(self) -> int:
        """How many of its samples are not over."""
        return len(self.unstarted) + len(self.preempted) + len(self.running)

    @property
    def next_sequences(self) -> list[SequenceState]:
        """Samples that go on from what is read now, or was: all that begin, or one paused."""
        return self.unstarted or self.preempted[:1]

    def create_sequences(self, decoder: TextDecoder | None) -> None:
        """Make its samples."""
        self.unstarted = [
            SequenceState(self, index, decoder) for index in range(self.spec.num_samples)
        ]

    def tokens_to_prefill(self) -> Tokens | None:
        """What has to be read next: the prompt, or all of a paused sample; None if nothing."""
        if self.unstarted:
            return self.spec.prompt
        return self.preempted[0].all_tokens if self.preempted else None

    def start_next(self, num_sequences: int) -> list[SequenceState]:
        """Let some samples run that go on from what was read."""
        line = self.unstarted or self.preempted
        started = line[:num_sequences]
        del line[:num_sequences]
        self.running.update(started)
        return started

    def preempt(self, sequence: SequenceState) -> None:
        """Let a sample wait that was running."""
        self.running.remove(sequence)
        # At the end: what is being read may be the first one's.
        self.preempted.append(sequence)

    def reset(self) -> None:
        """Let all samples wait, for all that was kept of them is gone."""
        self.prefill = self.prompt_kv = None
        stopped = sorted(self.running, key=lambda one: one.index)
        self.running.clear()
        for one in stopped:
            # A number may have been thrown for a token that never came.
            one.random_stream = RandomStream(self.spec.seed, one.index, num_skipped=len(one.tokens))
        self.unstarted = [one for one in stopped if not one.tokens] + self.unstarted
        self.preempted += [one for one in stopped if one.tokens]

    def finish_sequence(self, sequence: SequenceState) -> bool:
        """Note that a sample is over; whether all are."""
        self.running.remove(sequence)
        self._results[sequence.index] = sequence.result()
        return len(self._results) == self.spec.num_samples

    def build_response(self) -> SampleResponse:
        """The answer."""
        sequences = [self._results[index] for index in range(self.spec.num_samples)]
        if self.prompt_logprobs is None:
            return SampleResponse(sequences, prompt_cache_hit_tokens=self.num_cached_tokens)
        return self.prompt_logprobs.build_response(sequences, self.num_cached_tokens)


def stack_topk(rows: list[TopkRow]) -> TopkLogprobs:
    """The likeliest tokens of each position, one row each."""
    ids = np.stack([ids for ids, _ in rows])
    logprobs = np.stack([values for _, values in rows])
    # No number stands for "impossible" on the wire, and nothing stands below the filler.
    return TopkLogprobs(ids, np.maximum(logprobs, np.float32(FILLER_LOGPROB)))
