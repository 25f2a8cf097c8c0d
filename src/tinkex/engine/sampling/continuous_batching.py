"""Continuous batching: samples enter, take steps together, and leave, each in its own time.

admit what can be read -> give larger places to those that need them -> one pass over the next token
of every sample and some tokens of prompts -> choose a token for each -> hand out what is over
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import EngineFailure, FinishedSample
from tinkex.engine.sampling.admission import AdmissionControl, StartedSequences
from tinkex.engine.sampling.kv_manager import KVCacheManager
from tinkex.engine.sampling.model_runner import DecodeBatch, ModelRunner, PrefillChunk
from tinkex.engine.sampling.request import ModelLimits, SampleSpec, parse_sample_request
from tinkex.engine.sampling.request_state import RequestState, SamplerAdapter, SequenceState
from tinkex.engine.sampling.scheduler import (
    ArrivalQueue,
    LightStepPolicy,
    max_kv_tokens,
    split_prefill_tokens,
)
from tinkex.engine.sampling.slot_allocator import capacity_for
from tinkex.engine.sampling.stop_conditions import TextDecoder
from tinkex.engine.sampling.token_sampler import SampledTokens, SamplingSettings, sample_tokens
from tinkex.engine.trainer import is_out_of_memory
from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.nn.hosted_model import HostedModel
from tinkex.types import SampleRequest

LOG = get_logger(__name__)

__all__ = ["ContinuousBatcher", "SamplerAdapter", "TextDecoder"]

#: How long one step goes on before the caller has its turn, if nothing is over sooner.
STEP_SECONDS = 0.01

_SERVER_FAULT = RequestErrorCategory.Server
_NON_FINITE_LOGITS = EngineFailure(
    "the model's output is not a number: the weights have become too large or are not finite"
)
_OUT_OF_MEMORY = EngineFailure(
    "there is no memory left to go on with this sample; try again later, or ask for fewer tokens",
    _SERVER_FAULT,
)
_COMPUTE_FAILED = EngineFailure(
    "the sample could not be computed; the server's log says why, and it may be tried again",
    _SERVER_FAULT,
)


@dataclass(slots=True)
class _PreparedBatch:
    """Sequences that take a step together, as of a version of the cache."""

    version: int
    batch: DecodeBatch
    settings: SamplingSettings | None = None


class ContinuousBatcher:
    """All samples of one base model and its adapters."""

    def __init__(
        self,
        hosted_model: HostedModel,
        *,
        decoder: TextDecoder | None,
        eos_tokens: frozenset[int],
        max_context_tokens: int,
        config: EngineConfig,
    ) -> None:
        self._hosted_model = hosted_model
        self._decoder = decoder
        self._config = config
        self._limits = ModelLimits(
            vocab_size=hosted_model.vocab_size,
            max_context_tokens=max_context_tokens,
            eos_tokens=eos_tokens,
            has_tokenizer=decoder is not None,
        )
        self._model_runner = ModelRunner(hosted_model)
        self._kv_spec = self._model_runner.probe_kv_spec()
        self._queue: ArrivalQueue[RequestState] = ArrivalQueue()
        self._finished: list[FinishedSample] = []
        self._num_added = 0
        self._light_steps = LightStepPolicy()
        self._reset_memory()

    @property
    def max_requests(self) -> int:
        """How many requests can run at once."""
        return 1 if self._config.is_deterministic else self._config.max_sequences

    @property
    def used_bytes(self) -> int:
        """How much memory keys and values take, those kept for later included."""
        return self._kv_manager.used_bytes

    def __len__(self) -> int:
        return len(self._queue) + len(self._finished)

    def add(
        self,
        job_id: str,
        adapter: SamplerAdapter | None,
        request: SampleRequest,
        *,
        tenant_id: str = "",
    ) -> None:
        """Let a request in; a bad one is reported by `step`, and a ticket that runs starts anew."""
        self.cancel(job_id)
        try:
            ask = parse_sample_request(request, self._limits)
            self._check_memory(ask)
        except InvalidInput as error:
            self._finished.append(
                FinishedSample(job_id, EngineFailure(error.message, error.category))
            )
            return
        self._num_added += 1
        case = self._queue[job_id] = RequestState(
            job_id, self._num_added, adapter, ask, tenant_id=tenant_id
        )
        case.create_sequences(self._decoder)

    @torch.inference_mode()
    def cancel(self, job_id: str) -> None:
        """Free a request's memory at once; one that is not there is no error."""
        case = self._queue.get(job_id)
        if case is not None:
            self._admission.remove_request(case)
        self._finished = [over for over in self._finished if over.job_id != job_id]

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget all requests, and all that is kept for later ones."""
        for ticket in list(self._queue):
            self.cancel(ticket)
        self._finished.clear()
        self._kv_manager.clear()
        self._batches.clear()

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """Go a short way with all requests, and hand out those that are over."""
        deadline = time.monotonic() + STEP_SECONDS
        while self._queue and not self._finished:
            self._try_iteration()
            if time.monotonic() >= deadline:
                break
        over, self._finished = self._finished, []
        return over

    # --- trouble ---------------------------------------------------------------------------------
    def _try_iteration(self) -> None:
        """One turn; if it fails, those who may be to blame fail, and the others start over."""
        try:
            self._iterate()
        except Exception as error:  # one bad pass must not end the worker
            is_full = is_out_of_memory(error)
            if not is_full:
                LOG.exception("a pass of samples failed")
        else:
            return
        # Out of the handler: its traceback holds the tensors that were in the way.
        cases = list(self._queue.values())
        active = [case for case in cases if case.is_active] or cases
        self._reset_memory()
        for case in cases:
            case.reset()
        for case in active[-1:] if is_full else active:
            self._fail_request(case, _OUT_OF_MEMORY if is_full else _COMPUTE_FAILED)

    def _reset_memory(self) -> None:
        """Have nothing in memory; what was there may be in disorder, so it is not asked to go."""
        config = self._config
        self._kv_manager = KVCacheManager(
            self._kv_spec, config.cache_bytes, enable_prefix_caching=not config.is_deterministic
        )
        self._admission = AdmissionControl(
            self._queue,
            self._kv_manager,
            max_sequences=config.max_sequences,
            is_sequential=config.is_deterministic,
        )
        self._batches: dict[bool, _PreparedBatch] = {}
        """The sequences of the next step: of all tenants, and of those with few alone."""

    # --- one turn --------------------------------------------------------------------------------
    def _iterate(self) -> None:
        self._admit()
        self._grow_slots()
        is_mixed = self._admission.is_mixed
        is_light = is_mixed and self._light_steps.is_due
        started = time.monotonic()
        self._run_step(is_light=is_light)
        self._light_steps.record_step(
            time.monotonic() - started, is_light=is_light, is_mixed=is_mixed
        )

    def _run_step(self, *, is_light: bool) -> None:
        prepared = self._prepare_batch(is_light=is_light)
        crew = prepared.batch
        chunks = self._prefill_chunks(has_decodes=len(crew) > 0, is_light=is_light)
        hidden_TD = None
        if len(crew) or chunks:
            hidden_TD = self._model_runner.run(crew, chunks)
            for room in crew.slot_groups:
                room.advance_lengths()
            self._process_prefill(chunks, hidden_TD[len(crew) :])
        begun = self._admission.start_decoding(is_light=is_light)
        if len(crew) or begun:
            self._sample_next_tokens(prepared, hidden_TD, begun)
        elif self._queue and not chunks and not is_light:
            self._resolve_deadlock()

    def _prepare_batch(self, *, is_light: bool) -> _PreparedBatch:
        """The sequences that take a step; the same while none comes or goes."""
        found = self._batches.get(is_light)
        if found is None or found.version != self._kv_manager.version:
            rooms = [
                room for room in self._kv_manager.slot_groups if not (is_light and room.is_bulk)
            ]
            found = _PreparedBatch(
                self._kv_manager.version, DecodeBatch(rooms, self._hosted_model.device)
            )
            self._batches[is_light] = found
        return found

    def _admit(self) -> None:
        while (refused := self._admission.admit()) is not None:
            message = f"no memory to read the prompt: {refused.reason}"
            self._fail_request(refused.request, EngineFailure(message, _SERVER_FAULT))

    def _prefill_chunks(self, *, has_decodes: bool, is_light: bool) -> list[PrefillChunk]:
        fills = [
            fill for fill in self._admission.prefills if not (is_light and fill.request.is_bulk)
        ]
        shares = split_prefill_tokens(
            [fill.num_remaining for fill in fills],
            has_decodes=has_decodes,
            pass_tokens=self._config.pass_tokens,
        )
        return [PrefillChunk(fill, num) for fill, num in zip(fills, shares, strict=True) if num]

    def _process_prefill(self, chunks: Many[PrefillChunk], hidden_TD: Tensor) -> None:
        """Take in what a pass found out about prompts."""
        start = 0
        for fill, num in chunks:
            hidden_MD = hidden_TD[start : start + num]
            start += num
            case = fill.request
            if case.prompt_logprobs is not None and case.unstarted:
                logits_of = partial(self._model_runner.logits_for_adapter, case.adapter)
                case.prompt_logprobs.add_hidden_states(
                    fill.num_computed, hidden_MD, logits_of, self._limits.vocab_size
                )
            fill.num_computed += num
            if not fill.num_remaining:
                self._admission.finish_prefill(fill, hidden_MD[-1:].clone())

    # --- choosing --------------------------------------------------------------------------------
    def _sample_next_tokens(
        self, prepared: _PreparedBatch, hidden_TD: Tensor | None, started: Many[StartedSequences]
    ) -> None:
        """Give every sample its next token."""
        crew = prepared.batch
        logits_MV = self._logits(crew, hidden_TD, started)
        runs = crew.sequences + [one for start in started for one in start.sequences]
        numbers = np.array([run.random_stream.uniform() for run in runs])
        settings = self._get_settings(runs, None if started else prepared)
        self._append_tokens(runs, sample_tokens(logits_MV, settings, numbers))

    def _logits(
        self, batch: DecodeBatch, hidden_TD: Tensor | None, started: Many[StartedSequences]
    ) -> Tensor:
        parts = [hidden_TD[: len(batch)]] if hidden_TD is not None else []
        hidden_MD = torch.cat([*parts, *(start.hidden_1D for start in started)])
        adapters = batch.adapters + [start.request.adapter for start in started]
        logits_MV = self._model_runner.logits(hidden_MD, adapters)
        repeats = [1] * len(batch) + [len(start.sequences) for start in started]
        if max(repeats) == 1:
            return logits_MV
        return logits_MV.repeat_interleave(torch.tensor(repeats, device=logits_MV.device), dim=0)

    def _get_settings(
        self, sequences: Many[SequenceState], prepared: _PreparedBatch | None
    ) -> SamplingSettings:
        known = prepared.settings if prepared is not None else None
        if known is not None:
            return known
        settings = SamplingSettings([run.spec for run in sequences], self._hosted_model.device)
        if prepared is not None:
            prepared.settings = settings
        return settings

    def _append_tokens(self, sequences: Many[SequenceState], sampled: SampledTokens) -> None:
        for row, run in enumerate(sequences):
            case = run.request
            if run not in case.running:
                continue  # its request has failed
            if not math.isfinite(sampled.logprobs[row]):
                self._fail_request(case, _NON_FINITE_LOGITS)
            elif self._append_token(run, row, sampled):
                self._finish_sequence(run)

    def _append_token(self, sequence: SequenceState, row: int, sampled: SampledTokens) -> bool:
        """Give a sample its token; a tokenizer that cannot read it fails this request alone."""
        token, topk = sampled.tokens[row], sampled.topk_for_row(row, sequence.spec.num_topk)
        try:
            return sequence.append_token(token, sampled.logprobs[row], topk)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            reason = f"the tokenizer cannot turn the token {token} into text: {error!r:.200}"
        self._fail_request(
            sequence.request, EngineFailure(f"{reason}; give stop as token ids", _SERVER_FAULT)
        )
        return False

    def _finish_sequence(self, sequence: SequenceState) -> None:
        self._kv_manager.free(sequence)
        if sequence.request.finish_sequence(sequence):
            self._admission.remove_request(sequence.request)
            self._finished.append(
                FinishedSample(sequence.request.job_id, sequence.request.build_response())
            )

    # --- memory ----------------------------------------------------------------------------------
    def _grow_slots(self) -> None:
        """Give larger places to samples that need one; those that came last make room."""
        while not self._kv_manager.grow():
            self._preempt_newest()

    def _preempt_newest(self) -> None:
        for case in self._queue.newest_first():
            if self._admission.release_prompt(case):
                return
            placed = [one for one in case.running if one in self._kv_manager]
            if placed:
                last = max(placed, key=lambda one: one.index)
                self._kv_manager.free(last)
                case.preempt(last)
                return

    def _resolve_deadlock(self) -> None:
        """Nobody could go on: those that came last give up what they hold for the first one."""
        first, *others = self._queue.values()
        if any(self._admission.release_prompt(case) for case in reversed(others)):
            return
        if self._admission.release_prompt(first):
            return
        self._fail_request(
            first, EngineFailure("there is no memory for this request", _SERVER_FAULT)
        )

    def _check_memory(self, spec: SampleSpec) -> None:
        num_tokens = max_kv_tokens(spec.max_length, capacity_for(spec.max_length), spec.max_tokens)
        num_bytes = num_tokens * self._kv_spec.token_bytes
        if num_bytes > self._config.cache_bytes:
            raise InvalidInput(
                f"the prompt has {len(spec.prompt)} tokens and max_tokens is {spec.max_tokens}: "
                "that "
                f"may take {num_bytes} bytes of memory, and there are {self._config.cache_bytes}; "
                "ask for fewer tokens, or let the server have more cache_bytes"
            )

    def _fail_request(self, request: RequestState, failure: EngineFailure) -> None:
        self._admission.remove_request(request)
        request.running.clear()
        self._finished.append(FinishedSample(request.job_id, failure))
