"""Fixtures: a seeded server, and a function that runs the CLI against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import pytest

from tests.integration.conftest import BASE_MODEL, KEY, TIMEOUT_SECONDS, Connect, Serve
from tinkex import ServiceClient
from tinkex.cli.context import Context, Screen
from tinkex.cli.main import run
from tinkex.testing import StubServer


class CliResult(NamedTuple):
    """Exit code and output of a command."""

    exit_code: int
    out: str
    err: str
    error: BaseException | None

    @property
    def json(self) -> Any:
        """stdout as JSON."""
        assert self.exit_code == 0, self.err
        return json.loads(self.out)

    @property
    def failure(self) -> dict[str, Any]:
        """The JSON error on stderr."""
        assert self.out == ""
        found: dict[str, Any] = json.loads(self.err)["error"]
        return found


class RunCli(Protocol):
    """Runs a command line in this process."""

    def __call__(self, *words: str, context: Context | None = None) -> CliResult: ...


class SeededServer(NamedTuple):
    """A server with runs and checkpoints."""

    server: StubServer
    run_ids: list[str]
    training: str
    sampler: str


@pytest.fixture
def tinkex(capsys: pytest.CaptureFixture[str]) -> RunCli:
    def invoke(*words: str, context: Context | None = None) -> CliResult:
        capsys.readouterr()
        outcome = run(words, context or Context(stdout=Screen(width=200)))
        return CliResult(outcome.exit_code, *capsys.readouterr(), outcome.error)

    return invoke


def seed(server: StubServer, service: ServiceClient, other: ServiceClient) -> SeededServer:
    """Create two runs, the second with two checkpoints."""
    first = service.create_lora_training_client(BASE_MODEL, rank=4)
    second = other.create_lora_training_client(BASE_MODEL, rank=8, user_metadata={"team": "red"})
    training = second.save_state("0001").result(TIMEOUT_SECONDS).path
    sampler = second.save_weights_for_sampler("0002").result(TIMEOUT_SECONDS).path
    return SeededServer(server, [first.model_id, second.model_id], training, sampler)


@pytest.fixture
def own_seeded(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> SeededServer:
    """A server of this test, with two active sessions; variables select it."""
    server = serve(api_keys={KEY})
    select(server, monkeypatch)
    return seed(server, connect(server, project_id="p-1"), connect(server, project_id="p-2"))


@pytest.fixture
def seeded(own_seeded: SeededServer) -> SeededServer:
    """The server of a test; modules whose tests change nothing return `shared_seeded` instead."""
    return own_seeded


@pytest.fixture(scope="module")
def seeded_once() -> Iterator[SeededServer]:
    with StubServer(api_keys={KEY}) as server:
        address = {"base_url": server.url, "api_key": KEY}
        # Closed, because heartbeats would be among the calls of a test.
        with (
            ServiceClient(**address, project_id="p-1") as service,
            ServiceClient(**address, project_id="p-2") as other,
        ):
            seeded = seed(server, service, other)
        yield seeded


@pytest.fixture
def shared_seeded(
    seeded_once: SeededServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SeededServer]:
    """A server for all tests of a module, with two finished sessions; variables select it."""
    select(seeded_once.server, monkeypatch)
    yield seeded_once
    seeded_once.server.clear_faults()


def select(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables for a server."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
