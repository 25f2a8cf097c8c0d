"""How requests come in: what is read for them, and when their samples begin."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from tinkex.engine.sampling.kv_manager import KVCacheManager
from tinkex.engine.sampling.prefix_index import MIN_PREFIX_TOKENS, common_prefix_length
from tinkex.engine.sampling.prompt_logprobs import PromptLogprobs
from tinkex.engine.sampling.request import Tokens
from tinkex.engine.sampling.request_state import PrefillProgress, RequestState, SequenceState
from tinkex.engine.sampling.scheduler import (
    MAX_LIGHT_SEQUENCES,
    ArrivalQueue,
    fair_order,
    num_free_sequences,
    num_to_start,
)
from tinkex.nn.kv_cache import PromptKV

#: A prompt waits for another that is being read if they have so much of it in common.
_MIN_PENDING_SHARE = 0.5
#: Samples that had to make room come back when at most so much of the memory is in use.
_RESUME_MEMORY_SHARE = 0.75


class StartedSequences(NamedTuple):
    """Samples of one request that go on from the same token."""

    request: RequestState
    sequences: list[SequenceState]
    hidden_1D: Tensor


class RejectedRequest(NamedTuple):
    """A request that could not be read for, and why."""

    request: RequestState
    reason: str


class AdmissionControl:
    """Lets requests in, first come, first served, as memory and places allow."""

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
        """When each tenant's last request began, as a count of those before it."""
        self._num_started = 0

    @property
    def prefills(self) -> list[PrefillProgress]:
        """What is being read, in the order in which tenants take turns."""
        return [case.prefill for case in self._service_order() if case.prefill is not None]

    @property
    def is_mixed(self) -> bool:
        """Whether tenants with few sequences and others with many are being served."""
        active = [case for case in self._queue.values() if case.is_active]
        bulk = {case.tenant_id for case in active if case.is_bulk}
        return bool(bulk) and any(
            not case.is_bulk and case.tenant_id not in bulk for case in active
        )

    def _service_order(self) -> list[RequestState]:
        """The requests in the order in which they are served."""
        cases = list(self._queue.values())
        if not self._is_sequential:
            return fair_order(cases)
        waiting = sorted(
            cases, key=lambda case: (self._last_served.get(case.tenant_id, 0), case.arrival)
        )
        return [case for case in cases if case.is_active][:1] or waiting[:1]

    # --- reading ---------------------------------------------------------------------------------
    def admit(self) -> RejectedRequest | None:
        """Begin to read for those whose turn it is; says which one is to blame if that fails."""
        num_held, held = self._count_active()
        blocked: set[str] = set()
        for case in self._service_order():
            if case.tenant_id in blocked:
                continue
            tokens = (
                case.tokens_to_prefill()
                if case.prefill is None and case.prompt_kv is None
                else None
            )
            if tokens is None or self._is_prefix_pending(case, tokens):
                continue
            num_free = num_free_sequences(self._max_sequences, num_held, held[case.tenant_id])
            if num_free < 1 or not self._can_resume(case):
                # None of a tenant's requests goes before an earlier one.
                blocked.add(case.tenant_id)
                continue
            try:
                if not self._start_prefill(case, tokens):
                    return None
            except (MemoryError, RuntimeError) as error:
                return RejectedRequest(case, str(error))
            num_held += 1
            held[case.tenant_id] += 1
        return None

    def finish_prefill(self, prefill: PrefillProgress, hidden_1D: Tensor) -> None:
        """Note that all is read; `hidden_1D` is the last token's."""
        prefill.prompt_kv.last_hidden_1D = hidden_1D
        prefill.request.prefill, prefill.request.prompt_kv = None, prefill.prompt_kv
        self._prefix_cache.insert(prefill.request.prefix_key, prefill.tokens, prefill.prompt_kv)

    def _start_prefill(self, request: RequestState, tokens: Tokens) -> bool:
        if request.unstarted and not request.running:
            of_scope = (one for one in self._queue.values() if one.tenant_id == request.tenant_id)
            self._record_start(request)
            request.is_bulk = sum(one.num_unfinished for one in of_scope) > MAX_LIGHT_SEQUENCES
        about = request.spec.prompt_logprobs if request.unstarted else None
        if about is not None and request.prompt_logprobs is None:
            # First of all, for it may fail, and nothing is held yet.
            request.prompt_logprobs = PromptLogprobs(request.spec, about)
        num_usable = len(tokens) if about is None else about.first_position
        match = self._prefix_cache.find_prefix(request.prefix_key, tokens)
        num_common = min(match.num_tokens, num_usable) if match is not None else 0
        if match is not None and num_common == len(tokens) == match.value.num_tokens:
            self._prefix_cache.acquire(match.value)
            request.prompt_kv = match.value
        else:
            num_common = min(num_common, len(tokens) - 1)
            stored = self._allocate_prompt_kv(
                tokens, match.value if match is not None else None, num_common
            )
            if stored is None:
                return False
            request.prefill = PrefillProgress(request, tokens, stored, num_common)
        if request.unstarted:
            request.num_cached_tokens = num_common
        return True

    def _record_start(self, request: RequestState) -> None:
        self._num_started += 1
        present = {one.tenant_id for one in self._queue.values()}
        self._last_served = {
            scope: at for scope, at in self._last_served.items() if scope in present
        } | {request.tenant_id: self._num_started}

    def _allocate_prompt_kv(
        self, tokens: Tokens, source: PromptKV | None, num_common: int
    ) -> PromptKV | None:
        """Memory for tokens, the first of which are known from another prompt."""
        if source is None:
            return self._kv_manager.allocate_prompt(len(tokens))
        # Held, for making room may else take it away.
        self._prefix_cache.acquire(source)
        try:
            stored = self._kv_manager.allocate_prompt(len(tokens))
        finally:
            self._prefix_cache.release(source)
        if stored is not None:
            stored.copy_prefix(source, num_common)
        return stored

    def _is_prefix_pending(self, request: RequestState, tokens: Tokens) -> bool:
        """Whether most of it is being read for another request."""
        if request.spec.prompt_logprobs is not None or self._is_sequential:
            return False
        enough = max(MIN_PREFIX_TOKENS, int(len(tokens) * _MIN_PENDING_SHARE))
        return any(
            fill.request.prefix_key == request.prefix_key
            and common_prefix_length(fill.tokens, tokens) >= enough
            for fill in (one.prefill for one in self._queue.values())
            if fill is not None
        )

    def _can_resume(self, request: RequestState) -> bool:
        """Whether a sample that had to make room would not have to at once again."""
        if request.unstarted or not len(self._kv_manager):
            return True
        return self._kv_manager.busy_bytes <= _RESUME_MEMORY_SHARE * self._kv_manager.max_bytes

    # --- beginning -------------------------------------------------------------------------------
    def start_decoding(self, *, is_light: bool = False) -> list[StartedSequences]:
        """Let samples run whose context is read; only those of tenants with few if `is_light`."""
        begun, blocked = [], set()
        for case in self._service_order():
            stored = case.prompt_kv
            if stored is None or (is_light and case.is_bulk) or case.tenant_id in blocked:
                continue
            hidden_1D = stored.last_hidden_1D
            assert hidden_1D is not None
            sequences = self._allocate_slots(case, stored)
            if not sequences:
                blocked.add(case.tenant_id)
                continue
            if not case.unstarted:
                case.prompt_kv = None
                self._prefix_cache.release(stored)
            begun.append(StartedSequences(case, sequences, hidden_1D))
        return begun

    def _allocate_slots(self, request: RequestState, prompt_kv: PromptKV) -> list[SequenceState]:
        waiting = request.next_sequences
        num_free = self._num_free_sequences(request)
        num = num_to_start(len(waiting), num_free, prompt_kv.num_tokens, self._max_sequences)
        has_one_left = request.spec.max_length - prompt_kv.num_tokens == 1
        if num and not has_one_left:
            num = self._kv_manager.allocate(waiting[:num], prompt_kv)
        return request.start_next(num)

    def _num_free_sequences(self, request: RequestState) -> int:
        own = [
            len(one.running) for one in self._queue.values() if one.tenant_id == request.tenant_id
        ]
        num_held = sum(len(one.running) for one in self._queue.values())
        return num_free_sequences(self._max_sequences, num_held, sum(own))

    def _count_active(self) -> tuple[int, Counter[str]]:
        """The places of sequences that run or are about to, of all and by tenant."""
        held: Counter[str] = Counter()
        for case in self._queue.values():
            held[case.tenant_id] += len(case.running) + (case.prefill is not None)
        return held.total(), held

    # --- leaving ---------------------------------------------------------------------------------
    def release_prompt(self, request: RequestState) -> bool:
        """Let go of what was read for a request, which is read again later; False if nothing."""
        held = request.prefill.prompt_kv if request.prefill is not None else request.prompt_kv
        if held is None:
            return False
        request.prefill = request.prompt_kv = None
        self._prefix_cache.release(held)
        return True

    def remove_request(self, request: RequestState) -> None:
        """Let a request go with all it has."""
        del self._queue[request.job_id]
        for sequence in request.running:
            self._kv_manager.free(sequence)
        self.release_prompt(request)
