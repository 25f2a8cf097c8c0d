"""When a process that died is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError, StoreBusy
from tinkex.server.process.restart_policy import (
    CONFIG_EXIT_CODE,
    RestartPolicy,
    describe_exit,
    exit_code_for,
    is_own_failure,
)

POLICY = RestartPolicy(first_wait_seconds=0.5, max_wait_seconds=8.0, max_startup_failures=3)


def test_the_first_death_costs_nothing_and_later_ones_double_the_wait() -> None:
    assert [POLICY.wait_seconds(n) for n in range(1, 8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


@given(st.integers(0, 10**9))
def test_a_wait_is_never_longer_than_the_longest(num_deaths: int) -> None:
    assert 0.0 <= POLICY.wait_seconds(num_deaths) <= 8.0


def test_a_server_that_was_ready_once_never_gives_up() -> None:
    assert not POLICY.is_permanent_failure(1000, CONFIG_EXIT_CODE, was_ready=True)


def test_a_server_that_was_never_ready_gives_up_soon() -> None:
    assert [POLICY.is_permanent_failure(n, 1, was_ready=False) for n in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    # Settings do not become better by trying.
    assert POLICY.is_permanent_failure(1, CONFIG_EXIT_CODE, was_ready=False)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-250, "was killed by signal 250"),
    ],
)
def test_how_a_process_ended_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("code", "is_own"),
    [(0, True), (1, True), (-11, True), (-6, True), (-9, False), (-15, False), (-2, False)],
)
def test_a_signal_from_outside_is_not_the_process_own_failure(code: int, is_own: bool) -> None:
    assert is_own_failure(code) is is_own


def test_only_wrong_settings_are_final() -> None:
    assert exit_code_for(ConfigError("x")) == CONFIG_EXIT_CODE
    assert exit_code_for(StoreBusy("x")) == 1
