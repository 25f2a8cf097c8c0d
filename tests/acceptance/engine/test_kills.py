"""kill -9 of a real server's worker while the official SDK trains."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from safetensors.numpy import load

from tests.acceptance.engine import kill_scenarios
from tests.acceptance.engine.conftest import TIMEOUT_SECONDS, Official
from tests.acceptance.engine.scenario_context import max_difference
from tests.support.engine_server import LocalServer
from tests.support.serve_process import eventually

#: The tolerance for weights of models trained in shared passes.
TOLERANCE = 1e-5
#: The approximate time of a step of the two models.
STEP_SECONDS = 0.15


@pytest.fixture(scope="module")
def undisturbed(official: Official, exact_server: LocalServer) -> dict[str, Any]:
    found: dict[str, Any] = official.run_scenario(kill_scenarios.train, exact_server)
    return found


def test_training_is_bit_identical_across_kills(
    official: Official, exact_server: LocalServer, undisturbed: dict[str, Any]
) -> None:
    seen = train_with_kills(official, exact_server, [3, 17], random.Random(1))
    assert seen == undisturbed


def test_batched_training_across_kills_is_close(
    official: Official, server: LocalServer, undisturbed: dict[str, Any]
) -> None:
    seen = train_with_kills(official, server, [11], random.Random(2))
    for mine, other in zip(seen["adapters"], undisturbed["adapters"], strict=True):
        assert max_difference(load(mine), load(other)) <= TOLERANCE


def train_with_kills(
    official: Official, server: LocalServer, numbers: Sequence[int], rng: random.Random
) -> Any:
    """Train, killing the worker after these numbers of steps; returns what the client saw."""
    before, num_workers = num_steps(server), len(server.pids("worker"))
    running = official.start(kill_scenarios.train, server)
    for number in numbers:
        eventually(lambda number=number: num_steps(server) >= before + number, TIMEOUT_SECONDS)
        # At a random time of the following step.
        time.sleep(rng.random() * STEP_SECONDS)
        assert not running.done()
        server.kill_worker()
    seen = official.wait(running, server)
    assert len(server.pids("worker")) == num_workers + len(numbers)
    assert "Traceback" not in server.log_text
    return seen


def num_steps(server: LocalServer) -> int:
    """The number of recorded optimizer steps."""
    with closing(sqlite3.connect(server.home.store_file)) as store:
        query = "SELECT count(*) FROM steps WHERE kind = 'optim_step'"
        (found,) = store.execute(query).fetchone()
    return int(found)
