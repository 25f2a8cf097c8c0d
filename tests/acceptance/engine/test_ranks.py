"""`tinkex serve --ranks 2` gives the bits of one rank, also when a rank is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.acceptance.engine import ranks_scenarios
from tests.acceptance.engine.conftest import TIMEOUT_SECONDS, Official, served
from tests.acceptance.engine.test_kills import num_steps
from tests.support.engine_server import LocalServer
from tests.support.serve_process import eventually

EXACT = {"deterministic": "true", "gradient_shards": 8, "step_tokens": 64}


@pytest.fixture
def one_rank(tmp_path: Path, folders: Mapping[str, Path]) -> Iterator[LocalServer]:
    yield from served(tmp_path / "one", folders, **EXACT)


@pytest.fixture
def two_ranks(tmp_path: Path, folders: Mapping[str, Path]) -> Iterator[LocalServer]:
    yield from served(tmp_path / "two", folders, ranks=2, **EXACT)


def follower_pids(server: LocalServer) -> list[int]:
    """The child processes of the current worker."""
    worker = server.pids("worker")[-1]
    try:
        words = Path(f"/proc/{worker}/task/{worker}/children").read_text("ascii").split()
    except OSError:
        return []
    return [int(word) for word in words]


@pytest.mark.slow
def test_two_ranks_train_like_one_across_a_killed_rank(
    official: Official, one_rank: LocalServer, two_ranks: LocalServer
) -> None:
    expected = official.run_scenario(ranks_scenarios.train, one_rank)
    running = official.start(ranks_scenarios.train, two_ranks)
    eventually(lambda: num_steps(two_ranks) >= 2, TIMEOUT_SECONDS)
    (follower,) = follower_pids(two_ranks)
    os.kill(follower, signal.SIGKILL)
    seen = official.wait(running, two_ranks)
    assert seen == expected
    assert len(two_ranks.pids("worker")) == 2
    assert f"a rank of this worker is lost: rank 1 (pid {follower}) was killed by SIGKILL" in (
        two_ranks.log_text
    )
    assert "Traceback" not in two_ranks.log_text
    _check_idle_rank(two_ranks)


def _check_idle_rank(server: LocalServer) -> None:
    """The death of a rank is noticed without work, and no process is left behind."""
    (follower,) = follower_pids(server)
    os.kill(follower, signal.SIGKILL)
    eventually(lambda: len(server.pids("worker")) == 3, TIMEOUT_SECONDS)
    eventually(lambda: len(follower_pids(server)) == 1, TIMEOUT_SECONDS)
    (follower,) = follower_pids(server)
    os.kill(server.pids("worker")[-1], signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{follower}/exe").exists(), TIMEOUT_SECONDS)
