"""Which loaded models make room for another: a decision on numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def choose_evictions(
    needed_bytes: int, budget_bytes: int, loaded_bytes: Mapping[str, int], busy: Collection[str]
) -> list[str]:
    """The models to let go of, so that `needed_bytes` more fit into the budget, if they can.

    `loaded` has the bytes of each, longest unused first. Busy ones stay, whatever it costs; no
    more are named than it takes, and a budget of 0 has no end.
    """
    excess = sum(loaded_bytes.values()) + needed_bytes - budget_bytes
    doomed: list[str] = []
    for name, num_bytes in loaded_bytes.items():
        if excess <= 0 or budget_bytes == 0:
            break
        if name not in busy:
            doomed.append(name)
            excess -= num_bytes
    return doomed


def can_fit(
    needed_bytes: int, budget_bytes: int, loaded_bytes: Mapping[str, int], busy: Collection[str]
) -> bool:
    """Whether `needed_bytes` more fit into the budget once all that are not busy are gone."""
    held = sum(num_bytes for name, num_bytes in loaded_bytes.items() if name in busy)
    return budget_bytes == 0 or held + needed_bytes <= budget_bytes
