"""Which samples are watched, and how many tokens of their sequences have been reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class TokenRange(NamedTuple):
    """The tokens of a sequence that have not been reported."""

    sequence: int
    start: int
    end: int


class SampleWatches:
    """The watched samples of an engine."""

    __slots__ = ("_reported",)

    def __init__(self) -> None:
        self._reported: dict[str, dict[int, int]] = {}
        """The number of reported tokens by job and sequence."""

    def __bool__(self) -> bool:
        return bool(self._reported)

    def watch(self, job_id: str) -> None:
        """Report a sample from its first token, also if it has been reported before."""
        self._reported[job_id] = {}

    def unwatch(self, job_id: str) -> None:
        """Stop reporting a sample; unknown ids are ignored."""
        self._reported.pop(job_id, None)

    def clear(self) -> None:
        """Stop reporting all samples."""
        self._reported.clear()

    @property
    def job_ids(self) -> list[str]:
        """The ids of the watched samples."""
        return list(self._reported)

    def is_unreported(self, job_id: str, sequence: int) -> bool:
        """Whether no token of a sequence has been reported."""
        return sequence not in self._reported[job_id]

    def take_new(self, job_id: str, lengths: Iterable[tuple[int, int]]) -> list[TokenRange]:
        """Return the new tokens of a sample, given the index and length of its sequences."""
        reported = self._reported[job_id]
        ranges = []
        for sequence, length in lengths:
            start = reported.get(sequence, 0)
            if length > start:
                ranges.append(TokenRange(sequence, start, length))
                reported[sequence] = length
        return ranges
