"""Exchange of work with other groups: load reports, models given away, samples passed on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tinkex import clock
from tinkex.errors import RequestErrorCategory
from tinkex.jobs.fair_queue import FairQueue
from tinkex.jobs.group_member import GroupMember, GroupNews
from tinkex.jobs.job_types import Failed
from tinkex.jobs.resident_models import ResidentModels
from tinkex.jobs.result_log import ResultEntry, ResultLog
from tinkex.jobs.snapshots import AdapterMemory
from tinkex.store.records import JobRecord

#: Interval of load reports while there are other groups, and of looking for others.
REPORT_SECONDS = 1.0
ALONE_SECONDS = 5.0
#: Assumed speed of a worker that has not measured its own.
FIRST_TOKENS_PER_SECOND = 1000.0
_EMA_WEIGHT = 0.3


class ThroughputMeter:
    """Measures the tokens per second of a busy worker, as a running mean."""

    def __init__(self) -> None:
        self._tokens_per_second = FIRST_TOKENS_PER_SECOND
        self._is_measured = False
        self._num_tokens = 0
        self._busy_seconds = 0.0
        self._unreported_seconds = 0.0
        self._reported_at = time.monotonic()

    def take_busy_fraction(self) -> float:
        """Return the fraction of time since the last call that the engine was busy."""
        now = time.monotonic()
        elapsed, self._reported_at = max(now - self._reported_at, 1e-3), now
        busy, self._unreported_seconds = self._unreported_seconds, 0.0
        return min(1.0, busy / elapsed)

    def add(self, num_tokens: int, busy_seconds: float) -> None:
        """Count finished tokens and the time that the engine was busy."""
        self._num_tokens += num_tokens
        self._busy_seconds += busy_seconds
        self._unreported_seconds += busy_seconds
        if self._busy_seconds >= REPORT_SECONDS and self._num_tokens:
            rate = self._num_tokens / self._busy_seconds
            weight = _EMA_WEIGHT if self._is_measured else 1.0
            self._tokens_per_second += weight * (rate - self._tokens_per_second)
            self._num_tokens, self._busy_seconds, self._is_measured = 0, 0.0, True

    def seconds_for(self, num_tokens: int) -> float:
        """Estimate how long this many tokens take."""
        return num_tokens / max(self._tokens_per_second, 1.0)


class WorkExchange:
    """Exchanges work with other groups: reports the load, takes samples, gives models away."""

    def __init__(
        self,
        member: GroupMember,
        fair_queue: FairQueue,
        resident_models: ResidentModels,
        adapter_memory: AdapterMemory,
        result_log: ResultLog,
    ) -> None:
        self.throughput = ThroughputMeter()
        self._member = member
        self._fair_queue = fair_queue
        self._resident_models = resident_models
        self._adapter_memory = adapter_memory
        self._result_log = result_log
        self._next_at = 0.0

    def is_due(self) -> bool:
        """Return whether it is time for `run`."""
        return time.monotonic() >= self._next_at

    def expedite(self) -> None:
        """Make `run` due, because other groups have given work to this one."""
        self._next_at = 0.0

    def run(self) -> GroupNews:
        """Report the load, give a model away if the group is overloaded, and return the news."""
        seconds = REPORT_SECONDS if self._member.has_peers else ALONE_SECONDS
        self._next_at = time.monotonic() + seconds
        num_tokens = self._fair_queue.num_queued_tokens()
        news = self._member.report(
            self.throughput.seconds_for(num_tokens), self.throughput.take_busy_fraction()
        )
        if self._member.has_peers and not news.is_draining and self._fair_queue.num_lanes > 1:
            self._give_model_away()
        return news

    def pass_on(self, declined: Sequence[tuple[JobRecord, str]]) -> list[ResultEntry]:
        """Give samples that the engine cannot run to groups that train; returns the failed ones.

        Samples come with the reason of the engine, and fail if no such group serves them.
        """
        for job, _ in declined:
            self._fair_queue.finish_sample(job, 0)
        # The store must know that they run.
        self._result_log.flush()
        stuck = {job.id for job in self._member.give_samples([job for job, _ in declined])}
        now = clock.now()
        return [
            ResultEntry(job, _not_served(reason), None, now)
            for job, reason in declined
            if job.id in stuck
        ]

    def _give_model_away(self) -> None:
        """Give one waiting model to a group that has much less to do."""
        for resident in self._resident_models:
            run = resident.run
            is_waiting = self._fair_queue.has_lane(run.tenant_id, run.id)
            if not is_waiting or self._fair_queue.is_busy(run):
                continue
            receiver = self._member.choose_receiver(run.base_model)
            if receiver is None or not self._adapter_memory.evict(run.id):
                return
            self._result_log.flush()
            self._member.give_run(run.id, receiver)
            self._fair_queue.remove_model(run)
            return


def _not_served(reason: str) -> Failed:
    """The failure of a sample that only an engine that trains can run, if there is none."""
    return Failed(
        message=f"vLLM cannot run this sample ({reason}), and no worker that trains serves its "
        "base model; ask the operator to start one",
        category=RequestErrorCategory.Server,
    )
