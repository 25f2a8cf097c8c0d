"""Real servers, the process that runs the official SDK, and logs of failed tests."""

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

#: Small chunks, so that a few examples are already sent in several.
SMALL_CHUNKS = {"fwdbwd_max_chunk_len": 4}
#: A rejected request leaves a gap in the sequence numbers; later jobs wait this long for it.
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
    """Attach the server logs to a failed test."""
    report = yield
    servers = [each for each in getattr(item, "funcargs", {}).values() if _is_server(each)]
    if report.failed:
        report.sections += [(f"log of the server at {each.url}", each.log) for each in servers]
    return report


def _is_server(value: Any) -> bool:
    return isinstance(value, RealServer)


@pytest.fixture(scope="package")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with small chunks, short timeouts and plain API keys."""
    settings = {"jwt": False, "gap_seconds": SHORT_GAP, "client_flags": SMALL_CHUNKS}
    yield from serving(tmp_path_factory.mktemp("plain"), settings)


@pytest.fixture(scope="package")
def jwt_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server that uses tokens, compression and the other alternative protocol paths."""
    settings = {
        "api_processes": 2,
        # For nearly every result the client first gets only the size.
        "inline_result_bytes": 100,
        "client_flags": OTHER_ROADS,
    }
    yield from serving(tmp_path_factory.mktemp("jwt"), settings)


@pytest.fixture(scope="package")
def busy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A slow server with a short queue."""
    settings = {"fake_seconds": 0.5, "max_jobs_per_tenant": 8}
    yield from serving(tmp_path_factory.mktemp("busy"), settings)


@pytest.fixture(params=["real_server", "jwt_server"])
def server(request: pytest.FixtureRequest) -> RealServer:
    """Each of the servers in turn."""
    real_server: RealServer = request.getfixturevalue(request.param)
    return real_server


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
        """Return the methods that the scenario called; fails with its error."""
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
    """The methods that a scenario called, and its error."""

    called: set[str]
    failure_text: str = ""


def run_scenario(scenario: Scenario, place: ScenarioContext) -> ScenarioResult:
    """Run a scenario in its directory; executes in the SDK process."""
    os.chdir(place.directory)
    with watched() as called:
        try:
            scenario(place)
        except Exception:  # noqa: BLE001 - not every error can be sent to another process
            return ScenarioResult(called, traceback.format_exc())
    return ScenarioResult(called)


def prepare_process() -> None:
    """Remove this machine's settings; executes first in the SDK process."""
    for name in [*os.environ]:
        if name.startswith(("TINKER_", "TINKEX_")):
            del os.environ[name]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="package")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    """The process of the official SDK, which leaves sockets open: an error in this process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=prepare_process) as pool:
        yield Official(pool, tmp_path_factory.mktemp("official"))
