from __future__ import annotations

import os
import signal

import pytest

from tinkex.pipeline.train.signals import StopRequest, catch_signals


def test_the_first_signal_is_noted_and_nothing_is_raised() -> None:
    request = StopRequest()
    request.request(signal.SIGTERM, now=0.0)
    assert request.signal == signal.SIGTERM
    assert request.is_requested()


def test_the_same_press_arriving_twice_counts_once_and_a_later_one_ends_it() -> None:
    request = StopRequest()
    request.request(signal.SIGINT, now=10.0)
    request.request(signal.SIGINT, now=10.3)
    request.request(signal.SIGTERM, now=30.0)
    with pytest.raises(KeyboardInterrupt):
        request.request(signal.SIGINT, now=12.0)
    assert request.signal == signal.SIGINT


def test_work_that_changes_nothing_is_left_at_once() -> None:
    request, done = StopRequest(), []

    def work() -> str:
        request.request(signal.SIGTERM, now=0.0)
        done.append("after the signal")
        return "result"

    assert request.run_interruptible(work) is None
    assert done == []
    assert request.run_interruptible(lambda: "not begun") is None


def test_work_without_a_signal_gives_its_result() -> None:
    assert StopRequest().run_interruptible(lambda: 3) == 3


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with catch_signals(StopRequest()) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
