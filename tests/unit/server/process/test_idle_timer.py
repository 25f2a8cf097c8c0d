"""The idle timer."""

from __future__ import annotations

from tinkex.server.periodic import IdleTimer


def test_idle_time_counts_from_start_or_last_touch() -> None:
    idleness = IdleTimer(100.0)
    assert idleness.idle_seconds(5.0, 100.0) == 0.0
    assert idleness.idle_seconds(5.0, 130.0) == 30.0
    assert idleness.idle_seconds(6.0, 131.0) == 0.0
    assert idleness.idle_seconds(6.0, 133.5) == 2.5


def test_idle_time_ignores_wall_clock() -> None:
    idleness = IdleTimer(0.0)
    idleness.idle_seconds(5000.0, 0.0)
    # The clock was set back, or the machine slept: only changes of the file's time matter.
    assert idleness.idle_seconds(5000.0, 1.0) == 1.0
    assert idleness.idle_seconds(3.0, 2.0) == 0.0


def test_missing_activity_file_counts_as_idle() -> None:
    idleness = IdleTimer(0.0)
    assert idleness.idle_seconds(None, 4.0) == 4.0
    assert idleness.idle_seconds(1.0, 5.0) == 0.0
