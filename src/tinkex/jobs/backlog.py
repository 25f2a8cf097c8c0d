"""What runs next: fair over tenants, in order within a model.

Pure decisions over headers of jobs; no clock, no database, no engine.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tinkex.jobs.kinds import PASSES, Kind
from tinkex.store.records import Job, Run

#: Tenants without work whose place in line is remembered.
MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """How much one turn of the engine may take."""

    max_pass_bytes: int = 2_000_000
    """Payload bytes of the passes that share one run; a larger one runs alone."""
    max_passes: int = 32
    """Passes that share one run."""
    gap_seconds: float = 5.0
    """How long work waits for work with a lower number that has not arrived."""


@dataclass(slots=True)
class _Lane:
    """The work of one model, by number."""

    next_seq: int
    waiting: list[tuple[int, int, Job]] = field(default_factory=list)
    """(position, order of arrival, job), sorted."""
    is_busy: bool = False

    def head(self, now: float, gap_seconds: float) -> Job | None:
        if self.is_busy or not self.waiting:
            return None
        position, _, job = self.waiting[0]
        if position > self.next_seq and now < job.created_at + gap_seconds:
            return None
        return job


class Backlog:
    """All waiting work; `take_turn` and `take_samples` say what runs next."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        # Two lines of tenants: a sample that is served must not cost the turn of a training.
        self._tenants: OrderedDict[str, OrderedDict[str, _Lane]] = OrderedDict()
        self._samples: OrderedDict[str, deque[Job]] = OrderedDict()
        self._known: set[str] = set()
        self._dropped: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._known

    def add(self, job: Job, next_seq: int = 0) -> None:
        """Take in a job; `next_seq` is where its model stands, if this is its first job here."""
        if job.id in self._known:
            return
        self._known.add(job.id)
        if job.kind == Kind.SAMPLE:
            self._samples.setdefault(job.tenant_id, deque()).append(job)
            return
        lanes = self._tenants.setdefault(job.tenant_id, OrderedDict())
        # Work that belongs to no model has a lane to itself.
        lane = lanes.setdefault(job.run_id or job.id, _Lane(next_seq))
        insort(lane.waiting, (job.position, job.no, job))

    def knows_lane(self, tenant_id: str, run_id: str) -> bool:
        """Whether a model has work here."""
        return run_id in self._tenants.get(tenant_id, ())

    def is_busy(self, run: Run) -> bool:
        """Whether an operation of this model was taken and is not finished."""
        lanes = self._tenants.get(run.tenant_id, OrderedDict())
        lane = lanes.get(run.id)
        return lane is not None and lane.is_busy

    def drop(self, job_ids: Iterable[str]) -> None:
        """Forget jobs that were cancelled before they ran."""
        self._dropped.update(job_id for job_id in job_ids if job_id in self._known)

    def take_turn(self, now: float, max_operations: int = 1) -> list[Job]:
        """The next turn: operations one after the other, or passes that share a run of the engine.

        Tenants take turns; whoever was served goes to the end of the line.
        """
        turn: list[Job] = []
        while (job := self._next(turn, now, max_operations)) is not None:
            turn.append(job)
            self._take(job)
        return turn

    def _next(self, turn: list[Job], now: float, max_operations: int) -> Job | None:
        """Whoever fits into this turn and has waited longest since being served."""
        num_bytes = sum(job.payload_bytes for job in turn)
        for lanes in self._tenants.values():
            job = self._head(lanes, now)
            if job is not None and (not turn or self._fits(turn, num_bytes, job, max_operations)):
                return job
        return None

    def _head(self, lanes: Mapping[str, _Lane], now: float) -> Job | None:
        for lane in lanes.values():
            job = lane.head(now, self._limits.gap_seconds)
            if job is not None:
                return job
        return None

    def _fits(self, turn: list[Job], num_bytes: int, job: Job, max_operations: int) -> bool:
        if turn[0].attempts or job.attempts:
            # A worker died doing it, perhaps of it: others must not go down with it.
            return False
        if turn[0].kind not in PASSES:
            return job.kind not in PASSES and len(turn) < max_operations
        return (
            job.kind in PASSES
            and len(turn) < self._limits.max_passes
            and num_bytes + job.payload_bytes <= self._limits.max_pass_bytes
        )

    def _take(self, job: Job) -> None:
        lanes = self._tenants[job.tenant_id]
        name = job.run_id or job.id
        lane = lanes[name]
        lane.waiting.pop(0)
        lane.is_busy = True
        # The tenant's other models come first next time, and other tenants before them.
        lanes.move_to_end(name)
        self._tenants.move_to_end(job.tenant_id)

    def finish(self, job: Job) -> None:
        """Note that a taken operation is over, so that its model's next one may run."""
        self._known.discard(job.id)
        lanes = self._tenants.get(job.tenant_id, OrderedDict())
        name = job.run_id or job.id
        lane = lanes.get(name)
        if lane is None:
            return
        lane.is_busy = False
        lane.next_seq = max(lane.next_seq, job.position + 1)
        if not lane.waiting:
            del lanes[name]
        # Whoever comes back keeps its place in line: behind those who have waited longer, and
        # before those who were served since.
        if not lanes and len(self._tenants) > MAX_REMEMBERED:
            del self._tenants[job.tenant_id]

    def take_samples(self, num_free: int, *, is_idle: bool = True) -> list[Job]:
        """As many samples as there are places, one of each tenant in turn.

        One during which a worker died, perhaps of it, waits until it can be drawn alone.
        """
        taken: list[Job] = []
        while self._samples and len(taken) < num_free:
            tenant_id, samples = next(iter(self._samples.items()))
            if samples[0].attempts and (taken or not is_idle):
                break
            job = samples.popleft()
            self._known.discard(job.id)
            if job.id in self._dropped:
                self._dropped.discard(job.id)
            else:
                taken.append(job)
                self._samples.move_to_end(tenant_id)
                if job.attempts:
                    num_free = 1
            if not samples:
                del self._samples[tenant_id]
        return taken

    def next_look(self, now: float) -> float | None:
        """When work that waits for a gap may run although nothing else happens."""
        times = [
            lane.waiting[0][2].created_at + self._limits.gap_seconds
            for lanes in self._tenants.values()
            for lane in lanes.values()
            if lane.waiting and not lane.is_busy
        ]
        return min(times, default=None)
