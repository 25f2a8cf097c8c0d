"""The state of sample requests and their sequences, and the adapters they sample with."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tinkex.detokenizer import TextDecoder
from tinkex.engine.protocol import SampleProgress
from tinkex.engine.sampling.grammars import Grammar
from tinkex.engine.sampling.request import SampleSpec, Tokens
from tinkex.engine.sampling.stop_conditions import StopTextMatcher
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
    """The LoRA weights of an adapter, which must not change while it is sampled from."""

    key: Hashable
    """Adapters with equal keys have equal weights, so they can share cached prefixes."""
    scale: float
    """The scale of the low-rank update."""
    weights: Sequence[LoraPair | None] = field(repr=False)
    """The LoRA pair of each target."""
    dtype: torch.dtype = torch.float32
    """The dtype of the base model."""
    pairs: DecodeLoraPairs = field(init=False, repr=False)
    """The pairs in the layout of the decode kernels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", build_decode_pairs(self.weights, self.scale, self.dtype))

    @property
    def num_bytes(self) -> int:
        """The memory of `pairs`, without the weights."""
        return sum(pair.num_bytes for pair in self.pairs if pair is not None)


Floats = npt.NDArray[np.float32]
TopkRow = tuple[npt.NDArray[np.int32], Floats]


class SequenceState:
    """One sequence of a request."""

    __slots__ = (
        "_stop_matcher",
        "_topk",
        "grammar",
        "index",
        "logprobs",
        "random_stream",
        "request",
        "spec",
        "stop_reason",
        "tokens",
    )

    def __init__(
        self,
        request: RequestState,
        index: int,
        decoder: TextDecoder | None,
        grammar: Grammar | None = None,
    ) -> None:
        spec = request.spec
        self.request = request
        self.spec = spec
        self.index = index
        """Its index among the request's sequences."""
        self.random_stream = RandomStream(spec.seed, index)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None
        """None until the sequence is finished."""
        self.grammar = grammar
        """What its tokens must follow, after those it has."""
        self._topk: list[TopkRow] = []
        self._stop_matcher = (
            StopTextMatcher(decoder, spec.stops.texts) if decoder and spec.stops.texts else None
        )

    def append_token(self, token: int, logprob: float, topk: TopkRow | None = None) -> bool:
        """Append a sampled token; returns whether the sequence is finished."""
        if not self.spec.max_tokens:
            self.stop_reason = "length"
            return True
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        if self.grammar is not None:
            self.grammar.accept(token)
        if token in self.spec.stops.tokens or (
            self._stop_matcher and self._stop_matcher.matches_after(token)
        ):
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.spec.max_tokens:
            self.stop_reason = "length"
        return self.stop_reason is not None

    def progress(self, start: int, end: int) -> SampleProgress:
        """A range of its tokens."""
        topk = self._topk[start:end]
        return SampleProgress(
            self.request.job_id,
            self.index,
            start,
            tuple(self.tokens[start:end]),
            # As in the result, which has float32.
            tuple(array("f", self.logprobs[start:end])),
            tuple(stack_topk(topk).to_rows()) if topk else (),
        )

    @property
    def all_tokens(self) -> npt.NDArray[np.int64]:
        """The prompt and all sampled tokens."""
        return np.concatenate([self.spec.prompt, np.array(self.tokens, dtype=np.int64)])

    def result(self) -> SampledSequence:
        """The finished sequence for the response."""
        assert self.stop_reason is not None
        return SampledSequence(
            self.stop_reason,
            "",
            np.array(self.tokens, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            stack_topk(self._topk) if self._topk else None,
        )


class PrefillProgress:
    """A prompt, or a preempted sequence, whose KV cache is being computed."""

    def __init__(
        self, request: RequestState, tokens: Tokens, prompt_kv: PromptKV, num_computed: int
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.prompt_kv = prompt_kv
        self.num_computed = num_computed

    @property
    def num_remaining(self) -> int:
        """The number of tokens not computed yet."""
        return len(self.tokens) - self.num_computed


class RequestState:
    """One request with its unstarted, preempted, running and finished sequences."""

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
        """Lower numbers arrived earlier."""
        self.adapter = adapter
        self.spec = spec
        self.tenant_id = tenant_id
        """The tenant, who shares cached prefixes only with itself."""
        self.is_bulk = False
        """Whether its tenant had many sequences when it was admitted."""
        self.sequences: Sequence[SequenceState] = ()
        """All sequences, by index."""
        self.unstarted: list[SequenceState] = []
        """Sequences that have not started; they start at the end of the prompt."""
        self.preempted: list[SequenceState] = []
        """Sequences whose slots were freed; they resume after another prefill."""
        self.running: set[SequenceState] = set()
        """Sequences in the decode batch."""
        self.prefill: PrefillProgress | None = None
        """The prefill in progress."""
        self.prompt_kv: PromptKV | None = None
        """The completed prefill, while sequences wait for slots."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """The requested scores of the prompt."""
        self.num_cached_tokens = 0
        """The number of prompt tokens found in the prefix cache."""
        self._results: dict[int, SampledSequence] = {}

    @property
    def adapter_key(self) -> Hashable:
        """Identifies the adapter's weights; None for the base model."""
        return self.adapter.key if self.adapter is not None else None

    @property
    def prefix_key(self) -> Hashable:
        """Requests with equal keys may share cached prefixes."""
        return self.tenant_id, self.adapter_key

    @property
    def is_active(self) -> bool:
        """Whether it is computed now, or holds memory."""
        return bool(self.running or self.prefill or self.prompt_kv)

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished sequences."""
        return len(self.unstarted) + len(self.preempted) + len(self.running)

    @property
    def next_sequences(self) -> list[SequenceState]:
        """Sequences that continue from the current prefill: all unstarted, or one preempted."""
        return self.unstarted or self.preempted[:1]

    def create_sequences(self, decoder: TextDecoder | None, grammar: Grammar | None = None) -> None:
        """Create its sequences."""
        self.unstarted = [
            SequenceState(self, index, decoder, grammar.copy() if grammar is not None else None)
            for index in range(self.spec.num_samples)
        ]
        self.sequences = tuple(self.unstarted)

    def tokens_to_prefill(self) -> Tokens | None:
        """The tokens of the next prefill: the prompt, or a preempted sequence, or None."""
        if self.unstarted:
            return self.spec.prompt
        return self.preempted[0].all_tokens if self.preempted else None

    def start_next(self, num_sequences: int) -> list[SequenceState]:
        """Start up to `num_sequences` sequences that continue from the prefill."""
        waiting = self.unstarted or self.preempted
        started = waiting[:num_sequences]
        del waiting[:num_sequences]
        self.running.update(started)
        return started

    def preempt(self, sequence: SequenceState) -> None:
        """Move a running sequence to the preempted ones."""
        self.running.remove(sequence)
        # At the end: a prefill of the first one may be in progress.
        self.preempted.append(sequence)

    def reset(self) -> None:
        """Stop all sequences after the KV cache was lost."""
        self.prefill = self.prompt_kv = None
        stopped = sorted(self.running, key=lambda sequence: sequence.index)
        self.running.clear()
        for sequence in stopped:
            # The failed step may have used a random number without appending a token.
            sequence.random_stream = RandomStream(
                self.spec.seed, sequence.index, num_skipped=len(sequence.tokens)
            )
        self.unstarted = [sequence for sequence in stopped if not sequence.tokens] + self.unstarted
        self.preempted += [sequence for sequence in stopped if sequence.tokens]

    def finish_sequence(self, sequence: SequenceState) -> bool:
        """Record a finished sequence; returns whether the request is finished."""
        self.running.remove(sequence)
        self._results[sequence.index] = sequence.result()
        return len(self._results) == self.spec.num_samples

    def build_response(self) -> SampleResponse:
        """The response with all sequences."""
        sequences = [self._results[index] for index in range(self.spec.num_samples)]
        if self.prompt_logprobs is None:
            return SampleResponse(sequences, prompt_cache_hit_tokens=self.num_cached_tokens)
        return self.prompt_logprobs.build_response(sequences, self.num_cached_tokens)


def stack_topk(rows: list[TopkRow]) -> TopkLogprobs:
    """Stack the top-k tokens of each position."""
    ids = np.stack([ids for ids, _ in rows])
    logprobs = np.stack([values for _, values in rows])
    # The wire format has no minus infinity; the filler is its lowest value.
    return TopkLogprobs(ids, np.maximum(logprobs, np.float32(FILLER_LOGPROB)))
