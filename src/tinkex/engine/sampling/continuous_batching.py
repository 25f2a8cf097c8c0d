"""The batching loop (continuous batching): sequences join and leave the batch at every step.

One iteration: admit requests -> grow the KV slots of long sequences -> run one forward pass over
the next token of every sequence and over chunks of prompts -> sample a token for each sequence ->
collect finished requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tinkex.detokenizer import TextDecoder
from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import EngineFailure, FinishedSample
from tinkex.engine.sampling.admission import AdmissionControl, StartedSequences, check_memory
from tinkex.engine.sampling.grammar_requests import CompilingRequests, compute_masks
from tinkex.engine.sampling.grammars import GrammarCompiler
from tinkex.engine.sampling.kv_manager import KVCacheManager
from tinkex.engine.sampling.model_runner import DecodeBatch, ModelRunner, PrefillChunk
from tinkex.engine.sampling.progress import WatchedRequests
from tinkex.engine.sampling.request import ModelLimits, parse_sample_request
from tinkex.engine.sampling.request_state import RequestState, SamplerAdapter, SequenceState
from tinkex.engine.sampling.scheduler import (
    ArrivalQueue,
    LightStepPolicy,
    sequence_to_preempt,
    split_prefill_tokens,
)
from tinkex.engine.sampling.token_sampler import (
    NO_MASKS,
    SampledTokens,
    SamplingSettings,
    sample_tokens,
)
from tinkex.engine.trainer import is_out_of_memory
from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.types import SampleRequest

if TYPE_CHECKING:
    from tinkex.nn.hosted_model import HostedModel

LOG = get_logger(__name__)

#: How long `step` runs if no request finishes earlier.
STEP_SECONDS = 0.01

_SERVER_FAULT = RequestErrorCategory.Server
_NON_FINITE_LOGITS = EngineFailure(
    "the model's output is NaN or infinite: the weights are too large or not finite"
)
_OUT_OF_MEMORY = EngineFailure(
    "there is not enough memory to continue this sample; try again later, or request fewer tokens",
    _SERVER_FAULT,
)
_COMPUTE_FAILED = EngineFailure(
    "the sample could not be computed; the reason is in the server's log; you may try again",
    _SERVER_FAULT,
)


@dataclass(slots=True)
class _PreparedBatch:
    """The decode batch of a version of the KV cache."""

    version: int
    batch: DecodeBatch
    settings: SamplingSettings | None = None


class ContinuousBatcher:
    """Runs all sample requests of one base model and its adapters."""

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
        compiler = GrammarCompiler(decoder, hosted_model.vocab_size, eos_tokens)
        self._compiling = CompilingRequests(compiler)
        self._finished: list[FinishedSample] = []
        self._num_added = 0
        self._light_steps = LightStepPolicy()
        self.watched = WatchedRequests(self._queue, self._compiling)
        self._reset_memory()

    @property
    def used_bytes(self) -> int:
        """The memory of the KV cache, including cached prefixes."""
        return self._kv_manager.used_bytes

    def __len__(self) -> int:
        return len(self._queue) + len(self._finished) + len(self._compiling)

    def add(
        self,
        job_id: str,
        adapter: SamplerAdapter | None,
        request: SampleRequest,
        *,
        tenant_id: str = "",
    ) -> None:
        """Add a request, replacing one with the same job id; `step` reports an invalid one."""
        self.cancel(job_id)
        try:
            spec = parse_sample_request(request, self._limits)
            check_memory(spec, self._kv_spec.token_bytes, self._config.cache_bytes)
        except InvalidInput as error:
            self._finished.append(
                FinishedSample(job_id, EngineFailure(error.message, error.category))
            )
            return
        self._num_added += 1
        state = RequestState(job_id, self._num_added, adapter, spec, tenant_id=tenant_id)
        if spec.grammar is not None:
            self._compiling.add(state, spec.grammar)
            return
        state.create_sequences(self._decoder)
        self._queue[job_id] = state

    @torch.inference_mode()
    def cancel(self, job_id: str) -> int:
        """Remove a request and free its memory; returns the number of its sampled tokens."""
        self._compiling.cancel(job_id)
        self._finished = [sample for sample in self._finished if sample.job_id != job_id]
        request = self._queue.get(job_id)
        if request is None:
            return 0
        self._admission.remove_request(request)
        return sum(len(sequence.tokens) for sequence in request.sequences)

    @torch.inference_mode()
    def clear(self) -> None:
        """Remove all requests and cached prefixes."""
        for job_id in list(self._queue):
            self.cancel(job_id)
        self._compiling.clear()
        self._finished.clear()
        self._kv_manager.clear()
        self._batches.clear()

    @torch.inference_mode()
    def step(self) -> list[FinishedSample]:
        """Advance all requests for a short time; return the finished ones."""
        deadline = time.monotonic() + STEP_SECONDS
        if self._compiling:
            self._queue_compiled(0.0 if self._queue else STEP_SECONDS)
        while self._queue and not self._finished:
            self._try_iteration()
            if time.monotonic() >= deadline or (self.watched and self.watched.has_first_token()):
                break
        finished, self._finished = self._finished, []
        return finished

    def _queue_compiled(self, timeout_seconds: float) -> None:
        """Queue the requests whose grammars are compiled."""
        for state, grammar in self._compiling.take_compiled(timeout_seconds):
            if isinstance(grammar, EngineFailure):
                self._finished.append(FinishedSample(state.job_id, grammar))
                continue
            state.create_sequences(self._decoder, grammar)
            self._queue[state.job_id] = state

    # --- failures --------------------------------------------------------------------------------
    def _try_iteration(self) -> None:
        """Run one iteration; if it fails, fail the possible causes and restart the others."""
        try:
            self._iterate()
        except Exception as error:  # a failed pass must not stop the worker
            is_full = is_out_of_memory(error)
            if not is_full:
                LOG.exception("a pass of samples failed")
        else:
            return
        # Outside the handler: the traceback references the tensors of the failed attempt.
        requests = list(self._queue.values())
        active = [request for request in requests if request.is_active] or requests
        self._reset_memory()
        for request in requests:
            request.reset()
        # Any active request may have caused an error; for memory, the newest one is enough.
        for request in active[-1:] if is_full else active:
            self._fail_request(request, _OUT_OF_MEMORY if is_full else _COMPUTE_FAILED)

    def _reset_memory(self) -> None:
        """Replace the KV cache, which may be inconsistent after an error, by an empty one."""
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
        """The decode batches by `is_light`: of all tenants, and of light tenants only."""

    # --- one iteration ---------------------------------------------------------------------------
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
        batch = prepared.batch
        chunks = self._prefill_chunks(has_decodes=len(batch) > 0, is_light=is_light)
        hidden_TD = None
        if len(batch) or chunks:
            hidden_TD = self._model_runner.run(batch, chunks)
            for group in batch.slot_groups:
                group.advance_lengths()
            self._process_prefill(chunks, hidden_TD[len(batch) :])
        started = self._admission.start_decoding(is_light=is_light)
        if len(batch) or started:
            self._sample_next_tokens(prepared, hidden_TD, started)
        elif self._queue and not chunks and not is_light:
            self._resolve_deadlock()

    def _prepare_batch(self, *, is_light: bool) -> _PreparedBatch:
        """The decode batch, which is reused while no sequence joins, leaves or moves."""
        version = self._kv_manager.version
        prepared = self._batches.get(is_light)
        if prepared is None or prepared.version != version:
            groups = [
                group for group in self._kv_manager.slot_groups if not (is_light and group.is_bulk)
            ]
            prepared = _PreparedBatch(version, DecodeBatch(groups, self._hosted_model.device))
            self._batches[is_light] = prepared
        return prepared

    def _admit(self) -> None:
        while (rejected := self._admission.admit()) is not None:
            message = f"there is not enough memory for the prompt: {rejected.reason}"
            self._fail_request(rejected.request, EngineFailure(message, _SERVER_FAULT))

    def _prefill_chunks(self, *, has_decodes: bool, is_light: bool) -> list[PrefillChunk]:
        prefills = [
            prefill
            for prefill in self._admission.prefills
            if not (is_light and prefill.request.is_bulk)
        ]
        shares = split_prefill_tokens(
            [prefill.num_remaining for prefill in prefills],
            has_decodes=has_decodes,
            pass_tokens=self._config.pass_tokens,
        )
        return [PrefillChunk(*pair) for pair in zip(prefills, shares, strict=True) if pair[1]]

    def _process_prefill(self, chunks: Sequence[PrefillChunk], hidden_TD: Tensor) -> None:
        """Record the progress of prompts, and score their tokens if requested."""
        start = 0
        for prefill, num_tokens in chunks:
            hidden_MD = hidden_TD[start : start + num_tokens]
            start += num_tokens
            request = prefill.request
            if request.prompt_logprobs is not None and request.unstarted:
                compute_logits = partial(self._model_runner.logits_for_adapter, request.adapter)
                request.prompt_logprobs.add_hidden_states(
                    prefill.num_computed, hidden_MD, compute_logits, self._limits.vocab_size
                )
            prefill.num_computed += num_tokens
            if not prefill.num_remaining:
                self._admission.finish_prefill(prefill, hidden_MD[-1:].clone())

    # --- sampling --------------------------------------------------------------------------------
    def _sample_next_tokens(
        self,
        prepared: _PreparedBatch,
        hidden_TD: Tensor | None,
        started: Sequence[StartedSequences],
    ) -> None:
        """Sample the next token of every sequence."""
        batch = prepared.batch
        logits_MV = self._logits(batch, hidden_TD, started)
        new = [sequence for start in started for sequence in start.sequences]
        sequences = batch.sequences + new
        uniforms_M = np.array([sequence.random_stream.uniform() for sequence in sequences])
        # The settings of a prepared batch can be reused unless new sequences are added to it.
        settings = None if started else prepared.settings
        if settings is None:
            specs = [sequence.spec for sequence in sequences]
            settings = SamplingSettings(specs, self._hosted_model.device)
            if not started:
                prepared.settings = settings
        masks = NO_MASKS
        if settings.grammar_rows:
            masks, failed = compute_masks(sequences, settings.grammar_rows)
            for request, failure in failed.items():
                self._fail_request(request, failure)
        self._append_tokens(sequences, sample_tokens(logits_MV, settings, uniforms_M, masks))

    def _logits(
        self, batch: DecodeBatch, hidden_TD: Tensor | None, started: Sequence[StartedSequences]
    ) -> Tensor:
        parts = [hidden_TD[: len(batch)]] if hidden_TD is not None else []
        hidden_MD = torch.cat([*parts, *(start.hidden_1D for start in started)])
        adapters = batch.adapters + [start.request.adapter for start in started]
        logits_MV = self._model_runner.logits(hidden_MD, adapters)
        repeats = [1] * len(batch) + [len(start.sequences) for start in started]
        if max(repeats) == 1:
            return logits_MV
        return logits_MV.repeat_interleave(torch.tensor(repeats, device=logits_MV.device), dim=0)

    def _append_tokens(self, sequences: Sequence[SequenceState], sampled: SampledTokens) -> None:
        for row, sequence in enumerate(sequences):
            request = sequence.request
            if sequence not in request.running:
                continue  # its request has failed
            if not math.isfinite(sampled.logprobs[row]):
                self._fail_request(request, _NON_FINITE_LOGITS)
            elif self._append_token(sequence, row, sampled):
                self._finish_sequence(sequence)

    def _append_token(self, sequence: SequenceState, row: int, sampled: SampledTokens) -> bool:
        """Append a sampled token; returns whether the sequence is finished."""
        token, topk = sampled.tokens[row], sampled.topk_for_row(row, sequence.spec.num_topk)
        try:
            return sequence.append_token(token, sampled.logprobs[row], topk)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            reason = f"the tokenizer cannot decode token {token}: {error!r:.200}"
        failure = EngineFailure(f"{reason}; give stop as token ids", _SERVER_FAULT)
        self._fail_request(sequence.request, failure)
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
        """Enlarge the slots of full sequences; preempts the newest requests if memory runs out."""
        while not self._kv_manager.grow():
            self._preempt_newest()

    def _preempt_newest(self) -> None:
        for request in self._queue.newest_first():
            if self._admission.release_prompt(request):
                return
            placed = (sequence for sequence in request.running if sequence in self._kv_manager)
            preempted = sequence_to_preempt(placed)
            if preempted is not None:
                self._kv_manager.free(preempted)
                request.preempt(preempted)
                return

    def _resolve_deadlock(self) -> None:
        """No request can continue: release the prompts of later ones in favor of the first."""
        first, *others = self._queue.values()
        if not self._admission.release_for(first, others):
            failure = EngineFailure("there is not enough memory for this request", _SERVER_FAULT)
            self._fail_request(first, failure)

    def _fail_request(self, request: RequestState, failure: EngineFailure) -> None:
        self._admission.remove_request(request)
        request.running.clear()
        self._finished.append(FinishedSample(request.job_id, failure))
