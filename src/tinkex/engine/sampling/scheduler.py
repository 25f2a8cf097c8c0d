"""Who goes next: the order of requests, and how much of each step is spent on reading prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

#: The most prompt tokens that one pass reads; more are no faster, and all others wait for them.
FILL_TOKENS = 512
#: The same while samples are running, which every pass keeps waiting.
FILL_TOKENS_BESIDE = 128
#: So many samples of one prompt share what was read of it, if the prompt is long enough.
MIN_COHORT = 4
MIN_SHARED_TOKENS = 64


#: A tenant with more sequences than this has the others' turns taken without them.
MAX_LIGHT_SEQUENCES = 4
#: How much time those with few sequences get for themselves, per time of a step of all.
LIGHT_SHARE = 4.0
#: Of the places for sequences, the share that others are given beyond the limit to begin at once.
RESERVE_SHARE = 8


class Held(Protocol):
    """A request, as far as fairness goes."""

    @property
    def scope(self) -> str:
        """The tenant."""
        ...

    @property
    def number(self) -> int:
        """Lower came first."""
        ...

    @property
    def running(self) -> Collection[object]:
        """Its sequences that run."""
        ...


HeldRequest = TypeVar("HeldRequest", bound=Held)


def fair_order(requests: Iterable[HeldRequest]) -> list[HeldRequest]:
    """Requests of all tenants in turn: first those of tenants that have few sequences running."""
    waiting = list(requests)
    ranks: Counter[str] = Counter()
    for one in waiting:
        ranks[one.scope] += len(one.running)
    if len(ranks) <= 1:
        return waiting
    keys: dict[int, int] = {}
    for one in waiting:
        keys[one.number] = ranks[one.scope]
        ranks[one.scope] += 1
    return sorted(waiting, key=lambda one: (keys[one.number], one.number))


def num_places(max_sequences: int, num_held: int, num_own: int) -> int:
    """How many more sequences of a tenant may run, of which some run already.

    Beyond the limit a tenant that has none may begin one, so that it need not wait until others
    are done.
    """
    reserve = 0 if num_own else min(1, max_sequences + max_sequences // RESERVE_SHARE - num_held)
    return max(0, max_sequences - num_held, reserve)


class LightTurns:
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

    def note(self, seconds: float, *, is_light: bool, has_both: bool) -> None:
        """Count a step; with sequences of one kind only, the next few to arrive begin at once."""
        if not has_both:
            self._owed_seconds = LIGHT_SHARE * seconds
        elif is_light:
            self._owed_seconds -= seconds
        else:
            self._owed_seconds = max(self._owed_seconds, 0.0) + LIGHT_SHARE * seconds


class Numbered(Protocol):
    """Something that came before or after others."""

    @property
    def number(self) -> int:
        """Lower came first."""
        ...

    @property
    def ticket(self) -> str:
        """Its name."""
        ...


Request = TypeVar("Request", bound=Numbered)


class Line(dict[str, Request]):
    """All requests that are not over, by ticket, in the order of arrival."""

    def youngest_first(self) -> Iterator[Request]:
        """All of them, last come first."""
        return reversed(list(self.values()))


def share_tokens(wanted: Sequence[int], *, has_samples: bool, pass_tokens: int) -> list[int]:
    """How many tokens of each prompt a pass reads: first come, first served."""
    left = min(pass_tokens, FILL_TOKENS_BESIDE if has_samples else FILL_TOKENS)
    shares = []
    for num in wanted:
        share = min(num, left)
        shares.append(share)
        left -= share
    return shares


def is_shared(num_samples: int, num_tokens: int) -> bool:
    """Whether samples that begin together share their prompt, or each have a copy."""
    return num_samples >= MIN_COHORT and num_tokens >= MIN_SHARED_TOKENS


def cohort_sizes(num_samples: int, num_tokens: int) -> Iterator[int]:
    """How many samples might share their prompt, from all of them down to the fewest."""
    while is_shared(num_samples, num_tokens):
        yield num_samples
        num_samples = max(num_samples // 2, min(num_samples - 1, MIN_COHORT))


def num_to_begin(num_waiting: int, num_free: int, num_tokens: int, max_samples: int) -> int:
    """How many samples of a prompt begin now.

    A few more free places are awaited where that lets samples share a long prompt.
    """
    wanted = min(MIN_COHORT, max_samples)
    if is_shared(num_waiting, num_tokens) and num_free < wanted:
        return 0
    return min(num_waiting, num_free)


def max_kept_tokens(max_length: int, capacity: int, max_tokens: int) -> int:
    """How many tokens' memory a sequence may need at the most, all alone.

    What is read and the place where it goes on exist beside each other for a moment; one that draws
    a single token goes nowhere.
    """
    return max_length if max_tokens == 1 else max_length + capacity
