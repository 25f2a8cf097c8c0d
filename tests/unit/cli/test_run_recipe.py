from __future__ import annotations

import signal
import threading

import pytest

from tinkex.cli.commands.train.run_recipe import stop_on_interrupt


class Stopped:
    """Counts stop requests."""

    def __init__(self) -> None:
        self.count = 0

    def stop(self) -> None:
        self.count += 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_stops_the_run_with_a_notice(number: signal.Signals) -> None:
    run, notices = Stopped(), []
    before = signal.getsignal(number)
    with stop_on_interrupt(run, lambda: notices.append(1)):
        signal.raise_signal(number)
        assert (run.count, notices) == (1, [1])
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_second_interrupt_ends_at_once() -> None:
    run = Stopped()
    with pytest.raises(KeyboardInterrupt), stop_on_interrupt(run, lambda: None):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert run.count == 1


def test_run_stops_even_if_the_notice_fails() -> None:
    run = Stopped()

    def busy() -> None:
        raise RuntimeError("reentrant call")

    with stop_on_interrupt(run, busy):
        signal.raise_signal(signal.SIGINT)
    assert run.count == 1


def test_other_threads_do_not_handle_signals() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_on_interrupt(Stopped(), lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
