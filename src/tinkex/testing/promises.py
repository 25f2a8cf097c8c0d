"""Promises: work that was accepted, when it runs, and what came of it.

Work of one model runs in the order of its numbers, whatever order it arrives in; the same number is
never run twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Any, TypeAlias

from tinkex.errors import RequestErrorCategory
from tinkex.testing.answers import Answer
from tinkex.testing.timers import Clock, Timer, wake

Work: TypeAlias = Callable[[], Any]
Key: TypeAlias = Hashable


class JobState(StrEnum):
    """Where a promise is in its life."""

    PENDING = "pending"  #: accepted, not run yet
    DONE = "done"  #: the result is there
    FAILED = "failed"  #: it ran and failed, or was cancelled; final


class WorkFailed(Exception):
    """Work that cannot succeed, with the reason that the client is told."""

    def __init__(
        self, message: str, category: RequestErrorCategory = RequestErrorCategory.User
    ) -> None:
        super().__init__(message)
        self.message = message
        self.category = category


class Job:
    """One promise."""

    __slots__ = (
        "answers",
        "category",
        "error",
        "key",
        "kind",
        "request_id",
        "result",
        "sequence_ids",
        "state",
        "tenant",
        "waiters",
        "when_over",
    )

    def __init__(self, request_id: str, tenant: str, kind: str, key: Key) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.kind = kind
        self.key = key
        self.state = JobState.PENDING
        self.result: Any = None
        self.error = ""
        self.category = RequestErrorCategory.Unknown
        self.sequence_ids: list[str] | None = None
        self.answers: dict[bool, Answer] | None = None
        self.waiters: set[asyncio.Future[bool]] | None = None
        self.when_over: Callable[[Job], None] | None = None

    @property
    def is_over(self) -> bool:
        """True when the outcome is known."""
        return self.state is not JobState.PENDING

    def run(self, work: Work) -> None:
        """Do the work, unless it was cancelled, and tell whoever waits."""
        if self.is_over:
            return
        try:
            self.result, self.state = work(), JobState.DONE
        except WorkFailed as failure:
            self.fail(failure.message, failure.category)
            return
        except ValueError as error:
            self.fail(str(error), RequestErrorCategory.User)
            return
        except Exception as error:  # noqa: BLE001 - a job that breaks must not stop the server
            self.fail(f"{type(error).__name__}: {error}", RequestErrorCategory.Server)
            return
        self._tell()

    def fail(self, message: str, category: RequestErrorCategory) -> None:
        """End it without a result."""
        self.error, self.category, self.state = message, category, JobState.FAILED
        self._tell()

    def _tell(self) -> None:
        if self.waiters is not None:
            wake(self.waiters)
            self.waiters = None
        if self.when_over is not None:
            self.when_over(self)


class Promises:
    """All promises, by id and by what makes a repeated request the same request."""

    def __init__(self, max_kept: int = 50_000) -> None:
        self._jobs: dict[str, Job] = {}
        self._by_key: dict[Key, Job] = {}
        self._order: deque[Job] = deque()
        self._num_made = 0
        self._max_kept = max_kept

    def same(self, key: Key) -> Job | None:
        """The promise that was given for this key before."""
        return self._by_key.get(key)

    def make(self, tenant: str, kind: str, key: Key = None) -> Job:
        """A new promise; the oldest one whose outcome is known makes room."""
        self._num_made += 1
        job = Job(f"req-{self._num_made}", tenant, kind, key)
        self._jobs[job.request_id] = job
        if key is not None:
            self._by_key[key] = job
        self._order.append(job)
        if len(self._order) > self._max_kept and self._order[0].is_over:
            self._forget(self._order.popleft())
        return job

    def find(self, request_id: str) -> Job | None:
        """A promise by id."""
        return self._jobs.get(request_id)

    def was_made(self, request_id: str) -> bool:
        """Whether this id was ever given out, also if it is forgotten by now."""
        number = request_id.removeprefix("req-")
        return number.isdecimal() and 1 <= int(number) <= self._num_made

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.request_id, None)
        if self._by_key.get(job.key) is job:
            del self._by_key[job.key]


class Turns:
    """Runs the work of one model by number; waits for a missing number, but not for ever."""

    def __init__(self, clock: Clock, gap_seconds: float = 1.0, work_seconds: float = 0.0) -> None:
        self._clock = clock
        self._gap_seconds = gap_seconds
        self._work_seconds = work_seconds
        self._next = 1
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._gap: Timer | None = None
        self._is_busy = False

    def submit(self, number: int | None, action: Callable[[], None]) -> None:
        """Run the action when its turn comes; without a number, after all that is known."""
        if number is None:
            number = max([self._next, *(known + 1 for known in self._waiting)])
        self._waiting.setdefault(number, []).append(action)
        self._proceed()

    def _proceed(self) -> None:
        while self._waiting and not self._is_busy:
            number = min(self._waiting)
            if number > self._next:
                self._wait_for_gap()
                return
            actions = self._waiting[number]
            action = actions.pop(0)
            if not actions:
                del self._waiting[number]
            self._close_gap()
            self._next = max(self._next, number + 1)
            self._start(action)

    def _start(self, action: Callable[[], None]) -> None:
        if self._work_seconds <= 0.0:
            action()
            return
        self._is_busy = True
        self._clock.later(self._work_seconds, lambda: self._finish(action))

    def _finish(self, action: Callable[[], None]) -> None:
        self._is_busy = False
        action()
        self._proceed()

    def _wait_for_gap(self) -> None:
        if self._gap is None:
            self._gap = self._clock.later(self._gap_seconds, self._skip_gap)

    def _close_gap(self) -> None:
        if self._gap is not None:
            self._gap.cancel()
            self._gap = None

    def _skip_gap(self) -> None:
        self._gap = None
        if self._waiting:
            self._next = max(self._next, min(self._waiting))
            self._proceed()
