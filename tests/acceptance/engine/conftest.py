"""A real server with the real engine, and the process that runs the official SDK."""

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

#: Much longer than any test needs; detects hangs.
TIMEOUT_SECONDS = 180.0
NUM_TENANTS = 4


@pytest.fixture(scope="package", autouse=True)
def isolated_environment() -> Iterator[None]:
    """No key, URL or home of this machine reaches a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("TINKER_", "TINKEX_")):
                patch.delenv(name)
        yield


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Base model folders."""
    return make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def server(
    tmp_path_factory: pytest.TempPathFactory, folders: Mapping[str, Path]
) -> Iterator[LocalServer]:
    """A server of two base models."""
    yield from served(tmp_path_factory.mktemp("plain"), folders)


@pytest.fixture(scope="package")
def exact_server(
    tmp_path_factory: pytest.TempPathFactory, folders: Mapping[str, Path]
) -> Iterator[LocalServer]:
    """A server with `deterministic = true`."""
    yield from served(tmp_path_factory.mktemp("exact"), folders, deterministic="true")


def served(directory: Path, folders: Mapping[str, Path], **settings: Any) -> Iterator[LocalServer]:
    """Run a server during its tests; its worker may be killed."""
    server = LocalServer(
        directory / "home",
        folders,
        # A rejected request leaves a gap in the sequence numbers, and later jobs wait this long.
        gap_seconds=1.0,
        snapshot_changes=5,
        # Jobs must not fail because the worker was killed.
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
        self._num_scenarios = 0

    def run_scenario(self, scenario: Scenario, server: LocalServer, *args: Any) -> Any:
        """Run a scenario and return its result; fails the test with its traceback."""
        return self.wait(self.start(scenario, server, *args), server)

    def start(self, scenario: Scenario, server: LocalServer, *args: Any) -> Future[ScenarioResult]:
        """Start a scenario."""
        self._num_scenarios += 1
        context = new_context(server, self._directory / str(self._num_scenarios))
        return self._pool.submit(run_scenario, scenario, context, *args)

    def wait(self, running: Future[ScenarioResult], server: LocalServer) -> Any:
        """Wait for a started scenario; fails the test with its traceback."""
        failure_text, result = running.result(TIMEOUT_SECONDS)
        if failure_text:
            pytest.fail(f"{failure_text}\nServer log:\n{server.log_text[-5000:]}", pytrace=False)
        return result


def new_context(server: LocalServer, directory: Path) -> ScenarioContext:
    """New tenants and an empty directory on a server."""
    directory.mkdir()
    names = [f"{directory.name}-{number}" for number in range(NUM_TENANTS)]
    return ScenarioContext(
        url=server.ready(),
        keys=tuple(map(server.new_key, names)),
        folders=server.folders,
        directory=directory,
    )


@pytest.fixture(scope="package")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    """The official SDK in its own process: it leaves sockets open, which is an error in tests."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare_process) as pool:
        yield Official(pool, tmp_path_factory.mktemp("official"))
