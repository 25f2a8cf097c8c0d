"""Scheduling policies as pure functions: order of requests, prefill tokens of a step, preemption.

The loop that calls them is in `continuous_batching`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

#: Maximum prefill tokens of one pass; more are not faster, and delay the other requests.
PREFILL_TOKENS = 512
#: The same while sequences are decoding, because prefill delays their next token.
PREFILL_TOKENS_WITH_DECODE = 128
#: The minimum number of sequences, and length of the prompt, to share its KV cache.
MIN_SHARED_GROUP = 4
MIN_SHARED_TOKENS = 64

#: A tenant with at most this many sequences is light; others are bulk.
MAX_LIGHT_SEQUENCES = 4
#: The time of steps of light tenants alone, relative to steps of all.
LIGHT_TIME_RATIO = 4.0
#: max_sequences / RESERVE_DIVISOR more sequences may run, for tenants without any.
RESERVE_DIVISOR = 8


class SchedulableRequest(Protocol):
    """The properties of a request that `fair_order` needs."""

    @property
    def tenant_id(self) -> str:
        """The tenant."""
        ...

    @property
    def arrival(self) -> int:
        """Lower values arrived earlier."""
        ...

    @property
    def running(self) -> Collection[object]:
        """Its running sequences."""
        ...


SchedulableT = TypeVar("SchedulableT", bound=SchedulableRequest)


def fair_order(requests: Iterable[SchedulableT]) -> list[SchedulableT]:
    """Order requests round-robin by tenant; tenants with few running sequences come first."""
    waiting = list(requests)
    ranks: Counter[str] = Counter()
    for request in waiting:
        ranks[request.tenant_id] += len(request.running)
    if len(ranks) <= 1:
        return waiting
    keys: dict[int, int] = {}
    for request in waiting:
        keys[request.arrival] = ranks[request.tenant_id]
        ranks[request.tenant_id] += 1
    return sorted(waiting, key=lambda request: (keys[request.arrival], request.arrival))


def num_free_sequences(max_sequences: int, num_active: int, num_own: int) -> int:
    """The number of sequences that a tenant with `num_own` active ones may start.

    A tenant without any may start one beyond the limit, so that it need not wait for others.
    """
    reserve = (
        0 if num_own else min(1, max_sequences + max_sequences // RESERVE_DIVISOR - num_active)
    )
    return max(0, max_sequences - num_active, reserve)


class LightStepPolicy:
    """Shares time between light tenants, with few sequences, and bulk tenants.

    A step takes longer the more sequences it has. Steps of all tenants alternate with steps of
    light tenants alone, which get LIGHT_TIME_RATIO times as much time.
    """

    def __init__(self) -> None:
        self._owed_seconds = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next step is for light tenants only."""
        return self._owed_seconds > 0.0

    def record_step(self, seconds: float, *, is_light: bool, is_mixed: bool) -> None:
        """Record a step; if it was not mixed, light tenants that arrive next get the next step."""
        if not is_mixed:
            self._owed_seconds = LIGHT_TIME_RATIO * seconds
        elif is_light:
            self._owed_seconds -= seconds
        else:
            self._owed_seconds = max(self._owed_seconds, 0.0) + LIGHT_TIME_RATIO * seconds


class QueuedRequest(Protocol):
    """The properties of a request that `ArrivalQueue` needs."""

    @property
    def arrival(self) -> int:
        """Lower values arrived earlier."""
        ...

    @property
    def job_id(self) -> str:
        """The key in the queue."""
        ...


QueuedT = TypeVar("QueuedT", bound=QueuedRequest)


class ArrivalQueue(dict[str, QueuedT]):
    """All unfinished requests by job id, in order of arrival."""

    def newest_first(self) -> Iterator[QueuedT]:
        """All requests, newest first: the order in which they are preempted."""
        return reversed(list(self.values()))


class PlacedSequence(Protocol):
    """The property of a sequence that `sequence_to_preempt` needs."""

    @property
    def index(self) -> int:
        """Its number in the request."""
        ...


PlacedT = TypeVar("PlacedT", bound=PlacedSequence)


def sequence_to_preempt(placed: Iterable[PlacedT]) -> PlacedT | None:
    """Return which of a request's sequences in the KV cache loses its slot when memory runs out.

    It is the last one; the sequence is decoded again later, from its tokens so far.
    """
    return max(placed, key=lambda sequence: sequence.index, default=None)


def split_prefill_tokens(
    wanted: Sequence[int], *, has_decodes: bool, pass_tokens: int
) -> list[int]:
    """Distribute the prefill tokens of a pass over prompts: first come, first served."""
    remaining = min(pass_tokens, PREFILL_TOKENS_WITH_DECODE if has_decodes else PREFILL_TOKENS)
    shares = []
    for num in wanted:
        share = min(num, remaining)
        shares.append(share)
        remaining -= share
    return shares


def can_share_prompt(num_samples: int, num_tokens: int) -> bool:
    """Whether sequences that start together share the KV cache of their prompt."""
    return num_samples >= MIN_SHARED_GROUP and num_tokens >= MIN_SHARED_TOKENS


def shared_group_sizes(num_samples: int, num_tokens: int) -> Iterator[int]:
    """Yield the possible sizes of a group that shares a prompt, largest first."""
    while can_share_prompt(num_samples, num_tokens):
        yield num_samples
        num_samples = max(num_samples // 2, min(num_samples - 1, MIN_SHARED_GROUP))


def num_to_start(num_waiting: int, num_free: int, num_tokens: int, max_samples: int) -> int:
    """The number of sequences of a prompt to start now.

    Returns 0 to wait for more free sequences, if these could then share a long prompt.
    """
    wanted = min(MIN_SHARED_GROUP, max_samples)
    if can_share_prompt(num_waiting, num_tokens) and num_free < wanted:
        return 0
    return min(num_waiting, num_free)


def max_kv_tokens(max_length: int, capacity: int, max_tokens: int) -> int:
    """The maximum number of KV tokens that a sequence needs on its own.

    The prefill and the slot for decoding exist at the same time; a sequence of a single token needs
    no slot.
    """
    return max_length if max_tokens <= 1 else max_length + capacity
