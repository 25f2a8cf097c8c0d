"""Promises: order, gaps, repeats, failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tinkex.errors import RequestErrorCategory
from tinkex.testing.promises import Job, JobState, Promises, Turns, WorkFailed
from tinkex.testing.timers import Timer


class HandClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []

    def later(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(self.now + seconds, action)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted(
            (timer for timer in self._timers if not timer.is_over and timer.due_at <= end),
            key=lambda timer: timer.due_at,
        ):
            self.now = due[0].due_at
            due[0].is_over = True
            due[0].action()
        self.now = end


class Diary:
    """Submits numbered work and remembers what ran when."""

    def __init__(self, **options: float) -> None:
        self.clock = HandClock()
        self.turns = Turns(self.clock, **options)
        self.ran: list[object] = []

    def submit(self, *numbers: int | None) -> None:
        for number in numbers:
            self.turns.submit(number, lambda number=number: self.ran.append(number))  # type: ignore[misc]


def test_work_runs_by_number_whatever_order_it_arrives_in() -> None:
    diary = Diary()
    diary.submit(2, 3)
    assert diary.ran == []
    diary.submit(1)
    assert diary.ran == [1, 2, 3]


def test_a_gap_is_waited_for_but_not_for_ever() -> None:
    diary = Diary(gap_seconds=1.0)
    diary.submit(1, 3, 4, 6)
    diary.clock.advance(0.9)
    assert diary.ran == [1]
    diary.clock.advance(0.2)
    assert diary.ran == [1, 3, 4]
    diary.clock.advance(1.0)
    assert diary.ran == [1, 3, 4, 6]


def test_a_gap_that_is_filled_in_time_is_forgotten() -> None:
    diary = Diary(gap_seconds=1.0)
    diary.submit(2)
    diary.clock.advance(0.9)
    diary.submit(1, 4)
    diary.clock.advance(0.9)
    assert diary.ran == [1, 2], "the second gap has its own time"
    diary.submit(3)
    assert diary.ran == [1, 2, 3, 4]


def test_work_that_comes_too_late_runs_at_once() -> None:
    diary = Diary(gap_seconds=1.0)
    diary.submit(2)
    diary.clock.advance(2.0)
    diary.submit(1)
    assert diary.ran == [2, 1]


def test_work_without_a_number_comes_after_all_that_is_known() -> None:
    diary = Diary()
    diary.submit(None, 3, None)
    assert diary.ran == [None]
    diary.submit(2)
    assert diary.ran == [None, 2, 3, None]


def test_work_takes_its_time_one_after_the_other() -> None:
    diary = Diary(work_seconds=1.0)
    diary.submit(1, 2)
    diary.clock.advance(0.5)
    assert diary.ran == []
    diary.clock.advance(1.0)
    assert diary.ran == [1]
    diary.clock.advance(1.0)
    assert diary.ran == [1, 2]


def job() -> Job:
    return Promises().make("tenant", "optim_step")


def test_a_job_is_done_or_failed_and_says_whose_fault_it_was() -> None:
    def refuse() -> None:
        raise WorkFailed("no", RequestErrorCategory.Server)

    def misuse() -> None:
        raise ValueError("bad token")

    def crash() -> None:
        raise ZeroDivisionError("oops")

    done = job()
    done.run(lambda: 42)
    assert (done.state, done.result) == (JobState.DONE, 42)
    outcomes = []
    for work in (refuse, misuse, crash):
        failed = job()
        failed.run(work)
        assert failed.state is JobState.FAILED
        outcomes.append((failed.error, failed.category))
    assert outcomes == [
        ("no", RequestErrorCategory.Server),
        ("bad token", RequestErrorCategory.User),
        ("ZeroDivisionError: oops", RequestErrorCategory.Server),
    ]


def test_a_cancelled_job_does_not_run() -> None:
    ran: list[int] = []
    cancelled = job()
    cancelled.fail("cancelled", RequestErrorCategory.User)
    cancelled.run(lambda: ran.append(1))
    assert (ran, cancelled.error) == ([], "cancelled")


def test_whoever_watches_is_told_once() -> None:
    told: list[Job] = []
    watched = job()
    watched.when_over = told.append
    watched.run(lambda: 1)
    watched.run(lambda: 2)
    assert told == [watched]
    assert watched.result == 1


def test_a_key_finds_its_promise_again() -> None:
    promises = Promises()
    first = promises.make("tenant", "optim_step", ("op", "m", 1))
    assert promises.same(("op", "m", 1)) is first
    assert promises.same(("op", "m", 2)) is None
    assert promises.find(first.request_id) is first


def test_old_results_make_room_and_pending_ones_do_not() -> None:
    promises = Promises(max_kept=2)
    pending = promises.make("tenant", "optim_step", "pending")
    for number in range(3):
        promises.make("tenant", "optim_step", number).run(lambda: None)
    assert promises.find(pending.request_id) is pending
    pending.run(lambda: None)
    promises.make("tenant", "optim_step", "newest")
    assert promises.find(pending.request_id) is None
    assert promises.same("pending") is None
    assert promises.was_made(pending.request_id)


@pytest.mark.parametrize("request_id", ["req-0", "req-99", "req-x", "other"])
def test_ids_that_were_never_given_out_are_known(request_id: str) -> None:
    promises = Promises()
    promises.make("tenant", "optim_step")
    assert not promises.was_made(request_id)
