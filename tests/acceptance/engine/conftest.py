"""A real server with the real engine, and the process in which the official SDK runs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.engine.scenario_context import (
    Scenario,
    ScenarioContext,
    ScenarioResult,
    run_scenario,
)
from tests.acceptance.server.conftest import prepare_process
from tests.support.engine_server import LocalServer, make_folders

#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 180.0
NUM_TENANTS = 4


@pytest.fixture(scope="session", autouse=True)
def isolated_environment() -> Iterator[None]:
    """No key, URL or home of this machine reaches a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("TINKER_", "TINKEX_")):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Base models as users have them."""
    return make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, folders: Mapping[str, Path]
) -> Iterator[LocalServer]:
    """A server of two base models."""
    yield from served(tmp_path_factory.mktemp("plain"), folders)


@pytest.fixture(scope="session")
def exact_server(
    tmp_path_factory: pytest.TempPathFactory, folders: Mapping[str, Path]
) -> Iterator[LocalServer]:
    """A server whose every bit is certain, whoever shares it."""
    yield from served(tmp_path_factory.mktemp("exact"), folders, deterministic="true")


def served(directory: Path, folders: Mapping[str, Path], **settings: Any) -> Iterator[LocalServer]:
    """A server for as long as its tests run; its worker may be killed."""
    server = LocalServer(
        directory / "home",
        folders,
        # A refused request leaves a gap in the numbers, for which the work behind it waits so long.
        gap_seconds=1.0,
        snapshot_changes=5,
        # What a killed worker was doing is not to blame.
        max_attempts=1_000_000,
        **settings,
    )
    try:
        server.ready()
        yield server
    finally:
        server.end()


class Official:
    """Runs scenarios with the official SDK, in its own process."""

    def __init__(self, pool: ProcessPoolExecutor, directory: Path) -> None:
        self._pool = pool
        self._directory = directory
        self._num_played = 0

    def run_scenario(self, scenario: Scenario, server: LocalServer, *args: Any) -> Any:
        """What the scenario returns; fails with what went wrong in it."""
        return self.end(self.begin(scenario, server, *args), server)

    def begin(self, scenario: Scenario, server: LocalServer, *args: Any) -> Future[ScenarioResult]:
        """Let a scenario play by itself."""
        self._num_played += 1
        place = new_context(server, self._directory / str(self._num_played))
        return self._pool.submit(run_scenario, scenario, place, *args)

    def end(self, playing: Future[ScenarioResult], server: LocalServer) -> Any:
        """What a scenario that was begun returns; fails with what went wrong in it."""
        failure_text, result = playing.result(TIMEOUT_SECONDS)
        if failure_text:
            pytest.fail(
                f"{failure_text}\nThe server said:\n{server.log_text[-5000:]}", pytrace=False
            )
        return result


def new_context(server: LocalServer, directory: Path) -> ScenarioContext:
    """Tenants of their own and an empty directory on a server."""
    directory.mkdir()
    names = [f"{directory.name}-{number}" for number in range(NUM_TENANTS)]
    return ScenarioContext(
        url=server.ready(),
        keys=tuple(map(server.new_key, names)),
        folders=server.folders,
        directory=directory,
    )


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    """The official SDK's process: it leaves sockets open, which is an error in this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare_process) as pool:
        yield Official(pool, tmp_path_factory.mktemp("official"))
