"""How long nobody has asked."""

from __future__ import annotations

from tinkex.server.periodic import IdleTimer


def test_it_counts_from_the_start_and_from_each_touch() -> None:
    idleness = IdleTimer(100.0)
    assert idleness.idle_seconds(5.0, 100.0) == 0.0
    assert idleness.idle_seconds(5.0, 130.0) == 30.0
    assert idleness.idle_seconds(6.0, 131.0) == 0.0
    assert idleness.idle_seconds(6.0, 133.5) == 2.5


def test_what_the_wall_clock_says_does_not_matter() -> None:
    idleness = IdleTimer(0.0)
    idleness.idle_seconds(5000.0, 0.0)
    # The clock was set back, or the machine slept: the file's time is only compared.
    assert idleness.idle_seconds(5000.0, 1.0) == 1.0
    assert idleness.idle_seconds(3.0, 2.0) == 0.0


def test_a_file_that_is_gone_is_like_one_that_nobody_touches() -> None:
    idleness = IdleTimer(0.0)
    assert idleness.idle_seconds(None, 4.0) == 4.0
    assert idleness.idle_seconds(1.0, 5.0) == 0.0
