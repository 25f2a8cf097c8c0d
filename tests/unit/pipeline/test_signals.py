from __future__ import annotations

import os
import signal

import pytest

from tinkex.pipeline.train.signals import StopRequest, catch_signals


def test_first_signal_is_recorded_without_raising() -> None:
    request = StopRequest()
    request.request(signal.SIGTERM, now=0.0)
    assert request.signal == signal.SIGTERM
    assert request.is_requested()


def test_duplicate_ctrl_c_counts_once_and_a_later_one_interrupts() -> None:
    request = StopRequest()
    request.request(signal.SIGINT, now=10.0)
    request.request(signal.SIGINT, now=10.3)
    request.request(signal.SIGTERM, now=30.0)
    with pytest.raises(KeyboardInterrupt):
        request.request(signal.SIGINT, now=12.0)
    assert request.signal == signal.SIGINT


def test_interruptible_work_stops_at_once() -> None:
    request, done = StopRequest(), []

    def work() -> str:
        request.request(signal.SIGTERM, now=0.0)
        done.append("after the signal")
        return "result"

    assert request.run_interruptible(work) is None
    assert done == []
    assert request.run_interruptible(lambda: "not begun") is None


def test_interruptible_work_returns_its_result() -> None:
    assert StopRequest().run_interruptible(lambda: 3) == 3


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with catch_signals(StopRequest()) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
