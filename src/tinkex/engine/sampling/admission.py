"""Admission control: decides which prompts are prefilled and when sequences start decoding.

The loop that calls it at every step is in `continuous_batching`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tinkex.engine.sampling.kv_manager import KVCacheManager
from tinkex.engine.sampling.prefix_cache import MIN_PREFIX_TOKENS, common_prefix_length
from tinkex.engine.sampling.prompt_logprobs import PromptLogprobs
from tinkex.engine.sampling.request import SampleSpec, Tokens
from tinkex.engine.sampling.request_state import PrefillProgress, RequestState, SequenceState
from tinkex.engine.sampling.scheduler import (
    MAX_LIGHT_SEQUENCES,
    ArrivalQueue,
    fair_order,
    max_kv_tokens,
    num_free_sequences,
    num_to_start,
)
from tinkex.engine.sampling.slot_allocator import capacity_for
from tinkex.errors import InvalidInput
from tinkex.nn.kv_cache import PromptKV

#: A prompt waits for the prefill of another if they share at least this part of it.
_MIN_PENDING_SHARE = 0.5
#: Preempted sequences resume when at most this part of the KV cache is in use.
_RESUME_MEMORY_SHARE = 0.75


class StartedSequences(NamedTuple):
    """Sequences of one request that continue from the same token."""

    request: RequestState
    sequences: list[SequenceState]
    hidden_1D: Tensor


class RejectedRequest(NamedTuple):
    """A request whose prompt could not be allocated, and why."""

    request: RequestState
    reason: str


class AdmissionControl:
    """Admits requests in fair order, as memory and sequence limits allow."""

    def __init__(
        self,
        queue: ArrivalQueue[RequestState],
        kv_manager: KVCacheManager,
        *,
        max_sequences: int,
        is_sequential: bool,
    ) -> None:
        self._queue = queue
        self._kv_manager = kv_manager
        self._prefix_cache = kv_manager.prefix_cache
        self._max_sequences = max_sequences
        self._is_sequential = is_sequential
        self._last_served: dict[str, int] = {}
        """The value of `_num_started` when each tenant's last request started."""
        self._num_started = 0
        self._is_paused = False
        """Whether memory was released for a completed prompt, which must not be taken again."""

    @property
    def prefills(self) -> list[PrefillProgress]:
        """The prefills in progress, in service order."""
        return [request.prefill for request in self._service_order() if request.prefill is not None]

    @property
    def is_mixed(self) -> bool:
        """Whether both light tenants and bulk tenants are active."""
        active = [request for request in self._queue.values() if request.is_active]
        bulk = {request.tenant_id for request in active if request.is_bulk}
        return bool(bulk) and any(
            not request.is_bulk and request.tenant_id not in bulk for request in active
        )

    def _service_order(self) -> list[RequestState]:
        """The requests in the order in which they are served; one only if sequential."""
        requests = list(self._queue.values())
        if not self._is_sequential:
            return fair_order(requests)
        active = [request for request in requests if request.is_active]
        return active[:1] or sorted(requests, key=self._wait_order)[:1]

    def _wait_order(self, request: RequestState) -> tuple[int, int]:
        return self._last_served.get(request.tenant_id, 0), request.arrival

    # --- prefill ---------------------------------------------------------------------------------
    def admit(self) -> RejectedRequest | None:
        """Start prefills in service order; returns a request that could not be allocated."""
        if self._is_paused:
            return None
        num_active, by_tenant = self._count_active()
        blocked: set[str] = set()
        for request in self._service_order():
            if request.tenant_id in blocked:
                continue
            if request.prefill is not None or request.prompt_kv is not None:
                continue
            tokens = request.tokens_to_prefill()
            if tokens is None or self._is_prefix_pending(request, tokens):
                continue
            num_free = num_free_sequences(
                self._max_sequences, num_active, by_tenant[request.tenant_id]
            )
            if num_free < 1 or not self._can_resume(request):
                # A tenant's requests are admitted in order.
                blocked.add(request.tenant_id)
                continue
            try:
                if not self._start_prefill(request, tokens):
                    return None
            except (MemoryError, RuntimeError) as error:
                return RejectedRequest(request, str(error))
            num_active += 1
            by_tenant[request.tenant_id] += 1
        return None

    def finish_prefill(self, prefill: PrefillProgress, hidden_1D: Tensor) -> None:
        """Record a completed prefill; `hidden_1D` is the hidden state of its last token."""
        prefill.prompt_kv.last_hidden_1D = hidden_1D
        prefill.request.prefill, prefill.request.prompt_kv = None, prefill.prompt_kv
        self._prefix_cache.insert(prefill.request.prefix_key, prefill.tokens, prefill.prompt_kv)

    def _start_prefill(self, request: RequestState, tokens: Tokens) -> bool:
        if request.unstarted and not request.running:
            self._record_start(request)
            queued = self._queue.values()
            own = [other for other in queued if other.tenant_id == request.tenant_id]
            num_unfinished = sum(other.num_unfinished for other in own)
            request.is_bulk = num_unfinished > MAX_LIGHT_SEQUENCES
        prompt_spec = request.spec.prompt_logprobs if request.unstarted else None
        if prompt_spec is not None and request.prompt_logprobs is None:
            # This allocation may fail, so it comes before any memory is acquired.
            request.prompt_logprobs = PromptLogprobs(request.spec, prompt_spec)
        num_usable = len(tokens) if prompt_spec is None else prompt_spec.first_position
        match = self._prefix_cache.find_prefix(request.prefix_key, tokens)
        num_common = min(match.num_tokens, num_usable) if match is not None else 0
        if match is not None and num_common == len(tokens) == match.value.num_tokens:
            self._prefix_cache.acquire(match.value)
            request.prompt_kv = match.value
        else:
            num_common = min(num_common, len(tokens) - 1)
            prompt_kv = self._allocate_prompt_kv(
                tokens, match.value if match is not None else None, num_common
            )
            if prompt_kv is None:
                return False
            request.prefill = PrefillProgress(request, tokens, prompt_kv, num_common)
        if request.unstarted:
            request.num_cached_tokens = num_common
        return True

    def _record_start(self, request: RequestState) -> None:
        self._num_started += 1
        present = {queued.tenant_id for queued in self._queue.values()}
        self._last_served = {
            tenant_id: order
            for tenant_id, order in self._last_served.items()
            if tenant_id in present
        } | {request.tenant_id: self._num_started}

    def _allocate_prompt_kv(
        self, tokens: Tokens, source: PromptKV | None, num_common: int
    ) -> PromptKV | None:
        """Allocate KV memory for tokens, and copy a common prefix from `source`."""
        if source is None:
            return self._kv_manager.allocate_prompt(len(tokens))
        # Acquired, because the allocation may otherwise evict it.
        self._prefix_cache.acquire(source)
        try:
            prompt_kv = self._kv_manager.allocate_prompt(len(tokens))
        finally:
            self._prefix_cache.release(source)
        if prompt_kv is not None:
            prompt_kv.copy_prefix(source, num_common)
        return prompt_kv

    def _is_prefix_pending(self, request: RequestState, tokens: Tokens) -> bool:
        """Whether another request's prefill is computing most of these tokens."""
        if request.spec.prompt_logprobs is not None or self._is_sequential:
            return False
        min_common = max(MIN_PREFIX_TOKENS, int(len(tokens) * _MIN_PENDING_SHARE))
        return any(
            prefill.request.prefix_key == request.prefix_key
            and common_prefix_length(prefill.tokens, tokens) >= min_common
            for prefill in (queued.prefill for queued in self._queue.values())
            if prefill is not None
        )

    def _can_resume(self, request: RequestState) -> bool:
        """Whether a preempted sequence has enough memory not to be preempted again at once."""
        if request.unstarted or not len(self._kv_manager):
            return True
        return self._kv_manager.busy_bytes <= _RESUME_MEMORY_SHARE * self._kv_manager.max_bytes

    # --- decoding --------------------------------------------------------------------------------
    def start_decoding(self, *, is_light: bool = False) -> list[StartedSequences]:
        """Start sequences whose prefill is complete; only those of light tenants if `is_light`."""
        started, blocked = [], set()
        for request in self._service_order():
            prompt_kv = request.prompt_kv
            if prompt_kv is None or (is_light and request.is_bulk) or request.tenant_id in blocked:
                continue
            hidden_1D = prompt_kv.last_hidden_1D
            assert hidden_1D is not None
            sequences = self._allocate_slots(request, prompt_kv)
            if not sequences:
                blocked.add(request.tenant_id)
                continue
            if not request.unstarted:
                request.prompt_kv = None
                self._prefix_cache.release(prompt_kv)
            started.append(StartedSequences(request, sequences, hidden_1D))
            self._is_paused = False
        return started

    def _allocate_slots(self, request: RequestState, prompt_kv: PromptKV) -> list[SequenceState]:
        waiting = request.next_sequences
        num_free = self._num_free_sequences(request)
        num = num_to_start(len(waiting), num_free, prompt_kv.num_tokens, self._max_sequences)
        is_last_token = request.spec.max_length - prompt_kv.num_tokens <= 1
        if num and not is_last_token:
            num = self._kv_manager.allocate(waiting[:num], prompt_kv)
        return request.start_next(num)

    def _num_free_sequences(self, request: RequestState) -> int:
        queued = self._queue.values()
        num_own = sum(len(one.running) for one in queued if one.tenant_id == request.tenant_id)
        num_running = sum(len(one.running) for one in queued)
        return num_free_sequences(self._max_sequences, num_running, num_own)

    def _count_active(self) -> tuple[int, Counter[str]]:
        """The number of sequences that run or are being prefilled: in total, and by tenant."""
        by_tenant: Counter[str] = Counter()
        for request in self._queue.values():
            by_tenant[request.tenant_id] += len(request.running) + (request.prefill is not None)
        return by_tenant.total(), by_tenant

    # --- releasing -------------------------------------------------------------------------------
    def release_prompt(self, request: RequestState) -> bool:
        """Release a request's prefill, to be computed again later; False if it has none."""
        prompt_kv = request.prefill.prompt_kv if request.prefill is not None else request.prompt_kv
        if prompt_kv is None:
            return False
        request.prefill = request.prompt_kv = None
        self._prefix_cache.release(prompt_kv)
        return True

    def release_for(self, first: RequestState, others: Sequence[RequestState]) -> bool:
        """Release the prompt of the last of `others` in favor of `first`, or else that of `first`.

        Returns False if there is none. If `first` has its prompt, no prefill takes the memory
        before sequences have started.
        """
        is_released = any(self.release_prompt(request) for request in reversed(others))
        self._is_paused = is_released and first.prompt_kv is not None
        return is_released or self.release_prompt(first)

    def remove_request(self, request: RequestState) -> None:
        """Remove a request and free all its memory."""
        self._is_paused = False
        del self._queue[request.job_id]
        for sequence in request.running:
            self._kv_manager.free(sequence)
        self.release_prompt(request)


def check_memory(spec: SampleSpec, token_bytes: int, cache_bytes: int) -> None:
    """Refuse a request that would not fit into the KV cache alone."""
    num_tokens = max_kv_tokens(spec.max_length, capacity_for(spec.max_length), spec.max_tokens)
    if num_tokens * token_bytes > cache_bytes:
        raise InvalidInput(
            f"the prompt has {len(spec.prompt)} tokens and max_tokens is {spec.max_tokens}, which "
            f"may need {num_tokens * token_bytes} bytes of memory, but cache_bytes is "
            f"{cache_bytes}; request fewer tokens, or raise the server's limit"
        )
