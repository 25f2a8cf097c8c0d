"""Order of a model's operations: an optim_step that arrives before its forward_backward waits.

Clients number the operations of a model. An operation runs when all lower numbers have run, or have
not arrived for `gap_seconds`: a client that failed to send one of them must not block its model.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from tinkex.store.records import JobRecord


@dataclass(slots=True)
class ModelLane:
    """The waiting jobs of one model, by sequence number; at most one of them runs."""

    next_seq: int
    """The lowest sequence number that has not run."""
    waiting: list[tuple[int, int, float, JobRecord]] = field(default_factory=list)
    """(sequence number, order of arrival, time of arrival, job), sorted."""
    is_busy: bool = False
    """Whether a job of the model is running."""

    def add(self, job: JobRecord, now: float) -> None:
        """Add a job that arrived at this time of the monotonic clock."""
        insort(self.waiting, (job.position, job.no, now, job))

    def next_ready(self, now: float, gap_seconds: float) -> JobRecord | None:
        """Return the next job if it may run now."""
        if self.is_busy or not self.waiting:
            return None
        position, _, seen_at, job = self.waiting[0]
        if position > self.next_seq and now < seen_at + gap_seconds:
            return None
        return job

    def gap_ends_at(self, gap_seconds: float) -> float | None:
        """Return until when the next job waits at most for lower sequence numbers."""
        return self.waiting[0][2] + gap_seconds if self.waiting and not self.is_busy else None

    def finish(self, job: JobRecord) -> None:
        """Let the job after this one run."""
        self.is_busy = False
        self.next_seq = max(self.next_seq, job.position + 1)
