"""Fixtures: a seeded server, and a function that runs the CLI against it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

import pytest

from tests.integration.conftest import BASE_MODEL, KEY, TIMEOUT_SECONDS, Connect, Serve
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


@pytest.fixture
def seeded(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> SeededServer:
    """A server with two runs, the second with two checkpoints; variables select it."""
    server = serve(api_keys={KEY})
    service = connect(server, project_id="p-1")
    first = service.create_lora_training_client(BASE_MODEL, rank=4)
    other = connect(server, project_id="p-2")
    second = other.create_lora_training_client(BASE_MODEL, rank=8, user_metadata={"team": "red"})
    training = second.save_state("0001").result(TIMEOUT_SECONDS).path
    sampler = second.save_weights_for_sampler("0002").result(TIMEOUT_SECONDS).path
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    return SeededServer(server, [first.model_id, second.model_id], training, sampler)
