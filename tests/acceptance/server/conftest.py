"""Real servers, the process in which the official SDK runs, and the logs of what failed."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.acceptance.server.scenario_context import ScenarioContext
from tests.acceptance.server.surface import watched
from tests.support.real_server import TIMEOUT_SECONDS, RealServer, start_server

#: Small chunks, so that a handful of examples is already sent in several.
SMALL_CHUNKS = {"fwdbwd_max_chunk_len": 4}
#: A refused request leaves a gap in the numbers, for which the work behind it waits so long.
SHORT_GAP = 3.0
OTHER_ROADS = {
    "create_model_via_load_weights": True,
    "fwdbwd_max_chunk_len": 4,
    "proto_compress_fwdbwd": True,
    "sample_join_sampling_session": True,
    "sample_use_retrieve_futures": True,
}
Scenario = Callable[[ScenarioContext], None]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the servers of a failed test said."""
    report = yield
    servers = [each for each in getattr(item, "funcargs", {}).values() if _is_server(each)]
    if report.failed:
        report.sections += [(f"log of the server at {each.url}", each.log) for each in servers]
    return report


def _is_server(value: Any) -> bool:
    return isinstance(value, RealServer)


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server as `tinkex serve` starts it, only with small chunks, less patience and bare keys."""
    settings = {"jwt": False, "gap_seconds": SHORT_GAP, "client_flags": SMALL_CHUNKS}
    yield from serving(tmp_path_factory.mktemp("plain"), settings)


@pytest.fixture(scope="session")
def jwt_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server that hands out tokens and sends its clients over every other road there is."""
    settings = {
        "api_processes": 2,
        # Nearly every result is announced by its size first.
        "inline_result_bytes": 100,
        "client_flags": OTHER_ROADS,
    }
    yield from serving(tmp_path_factory.mktemp("jwt"), settings)


@pytest.fixture(scope="session")
def busy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A slow server that lets few requests wait."""
    settings = {"fake_seconds": 0.5, "max_jobs_per_tenant": 8}
    yield from serving(tmp_path_factory.mktemp("busy"), settings)


@pytest.fixture(params=["real_server", "jwt_server"])
def server(request: pytest.FixtureRequest) -> RealServer:
    """Each of the servers in turn."""
    found: RealServer = request.getfixturevalue(request.param)
    return found


def serving(home: Path, settings: dict[str, Any]) -> Iterator[RealServer]:
    """A server for as long as its tests run."""
    server = start_server(home, settings)
    try:
        yield server
    finally:
        server.stop()


class Official:
    """Runs scenarios with the official SDK, in its own process, each one once."""

    def __init__(self, pool: ProcessPoolExecutor, directory: Path) -> None:
        self._pool = pool
        self._directory = directory
        self._played: dict[str, ScenarioResult] = {}

    def drive(self, scenario: Scenario, server: RealServer) -> set[str]:
        """Which methods the scenario called; fails with what went wrong in it."""
        name = f"{scenario.__module__.rpartition('.')[2]}-{scenario.__name__}"
        if name not in self._played:
            self._played[name] = self._run_scenario(name, scenario, server)
        played = self._played[name]
        if played.failure_text:
            pytest.fail(played.failure_text, pytrace=False)
        return played.called

    def _run_scenario(self, name: str, scenario: Scenario, server: RealServer) -> ScenarioResult:
        directory = self._directory / name
        directory.mkdir()
        place = ScenarioContext(
            url=server.url,
            key=server.new_key(name),
            other_key=server.new_key(f"{name}-stranger"),
            directory=directory,
        )
        return self._pool.submit(run_scenario, scenario, place).result(TIMEOUT_SECONDS)


class ScenarioResult(NamedTuple):
    """What a scenario called, and what went wrong in it."""

    called: set[str]
    failure_text: str = ""


def run_scenario(scenario: Scenario, place: ScenarioContext) -> ScenarioResult:
    """Runs there: plays a scenario in its directory."""
    os.chdir(place.directory)
    with watched() as called:
        try:
            scenario(place)
        except Exception:  # noqa: BLE001 - not every error can be sent to another process
            return ScenarioResult(called, traceback.format_exc())
    return ScenarioResult(called)


def prepare_process() -> None:
    """Runs there first: nothing of this machine's settings may count."""
    for name in [*os.environ]:
        if name.startswith(("TINKER_", "TINKEX_")):
            del os.environ[name]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    """The official SDK's process: it leaves sockets open, which is an error in this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare_process) as pool:
        yield Official(pool, tmp_path_factory.mktemp("official"))
