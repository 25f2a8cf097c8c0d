"""Who goes next: the order of requests, and how much of each step is spent on reading prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

#: The most prompt tokens that one pass reads; more are no faster, and all others wait for them.
PREFILL_TOKENS = 512
#: The same while samples are running, which every pass keeps waiting.
PREFILL_TOKENS_WITH_DECODE = 128
#: So many samples of one prompt share what was read of it, if the prompt is long enough.
MIN_SHARED_GROUP = 4
MIN_SHARED_TOKENS = 64


#: A tenant with more sequences than this has the others' turns taken without them.
MAX_LIGHT_SEQUENCES = 4
#: How much time those with few sequences get for themselves, per time of a step of all.
LIGHT_TIME_RATIO = 4.0
#: Of the places for sequences, the share that others are given beyond the limit to begin at once.
RESERVE_DIVISOR = 8


class SchedulableRequest(Protocol):
    """A request, as far as fairness goes."""

    @property
    def tenant_id(self) -> str:
        """The tenant."""
        ...

    @property
    def arrival(self) -> int:
        """Lower came first."""
        ...

    @property
    def running(self) -> Collection[object]:
        """Its sequences that run."""
        ...


SchedulableT = TypeVar("SchedulableT", bound=SchedulableRequest)


def fair_order(requests: Iterable[SchedulableT]) -> list[SchedulableT]:
    """Requests of all tenants in turn: first those of tenants that have few sequences running."""
    waiting = list(requests)
    ranks: Counter[str] = Counter()
    for one in waiting:
        ranks[one.tenant_id] += len(one.running)
    if len(ranks) <= 1:
        return waiting
    keys: dict[int, int] = {}
    for one in waiting:
        keys[one.arrival] = ranks[one.tenant_id]
        ranks[one.tenant_id] += 1
    return sorted(waiting, key=lambda one: (keys[one.arrival], one.arrival))


def num_free_sequences(max_sequences: int, num_active: int, num_own: int) -> int:
    """How many more sequences of a tenant may run, of which some run already.

    Beyond the limit a tenant that has none may begin one, so that it need not wait until others
    are done.
    """
    reserve = (
        0 if num_own else min(1, max_sequences + max_sequences // RESERVE_DIVISOR - num_active)
    )
    return max(0, max_sequences - num_active, reserve)


class LightStepPolicy:
    """Shares time between tenants with few sequences and those with many.

    A step takes longer the more sequences it has. Steps of all tenants alternate with steps of
    the light ones alone, which get LIGHT_SHARE times as much time.
    """

    def __init__(self) -> None:
        self._owed_seconds = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next step is for the few alone."""
        return self._owed_seconds > 0.0

    def record_step(self, seconds: float, *, is_light: bool, is_mixed: bool) -> None:
        """Count a step; with sequences of one kind only, the next few to arrive begin at once."""
        if not is_mixed:
            self._owed_seconds = LIGHT_TIME_RATIO * seconds
        elif is_light:
            self._owed_seconds -= seconds
        else:
            self._owed_seconds = max(self._owed_seconds, 0.0) + LIGHT_TIME_RATIO * seconds


class QueuedRequest(Protocol):
    """Something that came before or after others."""

    @property
    def arrival(self) -> int:
        """Lower came first."""
        ...

    @property
    def job_id(self) -> str:
        """Its name."""
        ...


QueuedT = TypeVar("QueuedT", bound=QueuedRequest)


class ArrivalQueue(dict[str, QueuedT]):
    """All requests that are not over, by ticket, in the order of arrival."""

    def newest_first(self) -> Iterator[QueuedT]:
        """All of them, last come first."""
        return reversed(list(self.values()))


def split_prefill_tokens(
    wanted: Sequence[int], *, has_decodes: bool, pass_tokens: int
) -> list[int]:
    """How many tokens of each prompt a pass reads: first come, first served."""
    left = min(pass_tokens, PREFILL_TOKENS_WITH_DECODE if has_decodes else PREFILL_TOKENS)
    shares = []
    for num in wanted:
        share = min(num, left)
        shares.append(share)
        left -= share
    return shares


def can_share_prompt(num_samples: int, num_tokens: int) -> bool:
    """Whether samples that begin together share their prompt, or each have a copy."""
    return num_samples >= MIN_SHARED_GROUP and num_tokens >= MIN_SHARED_TOKENS


def shared_group_sizes(num_samples: int, num_tokens: int) -> Iterator[int]:
    """How many samples might share their prompt, from all of them down to the fewest."""
    while can_share_prompt(num_samples, num_tokens):
        yield num_samples
        num_samples = max(num_samples // 2, min(num_samples - 1, MIN_SHARED_GROUP))


def num_to_start(num_waiting: int, num_free: int, num_tokens: int, max_samples: int) -> int:
    """How many samples of a prompt begin now.

    A few more free places are awaited where that lets samples share a long prompt.
    """
    wanted = min(MIN_SHARED_GROUP, max_samples)
    if can_share_prompt(num_waiting, num_tokens) and num_free < wanted:
        return 0
    return min(num_waiting, num_free)


def max_kv_tokens(max_length: int, capacity: int, max_tokens: int) -> int:
    """How many tokens' memory a sequence may need at the most, all alone.

    What is read and the place where it goes on exist beside each other for a moment; one that draws
    a single token goes nowhere.
    """
    return max_length if max_tokens == 1 else max_length + capacity
