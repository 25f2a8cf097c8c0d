"""Restart waits and permanent failures."""

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


def test_restart_wait_doubles_after_first_exit() -> None:
    assert [POLICY.wait_seconds(n) for n in range(1, 8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


@given(st.integers(0, 10**9))
def test_restart_wait_is_limited(num_deaths: int) -> None:
    assert 0.0 <= POLICY.wait_seconds(num_deaths) <= 8.0


def test_no_permanent_failure_after_readiness() -> None:
    assert not POLICY.is_permanent_failure(1000, CONFIG_EXIT_CODE, was_ready=True)


def test_permanent_failure_before_readiness() -> None:
    assert [POLICY.is_permanent_failure(n, 1, was_ready=False) for n in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    # Restarting does not fix settings.
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
def test_describe_exit(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("code", "is_own"),
    [(0, True), (1, True), (-11, True), (-6, True), (-9, False), (-15, False), (-2, False)],
)
def test_external_signal_is_not_own_failure(code: int, is_own: bool) -> None:
    assert is_own_failure(code) is is_own


def test_only_config_errors_are_final() -> None:
    assert exit_code_for(ConfigError("x")) == CONFIG_EXIT_CODE
    assert exit_code_for(StoreBusy("x")) == 1
