"""Creation of clients from the context."""

from __future__ import annotations

import builtins
from typing import Any, Self

import pytest

from tinkex.cli.client import admin_client, build_config, rest_client, service_client
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError, describe_error
from tinkex.cli.main import run
from tinkex.client.config import Config
from tinkex.errors import ConfigError
from tinkex.installation import install_command
from tinkex.types import Cursor, TrainingRunsResponse


class Ready:
    """A completed future."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class StubService:
    """Fake of the service client and its REST client."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ended_with: list[object] = []
        self.holder = object()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.ended_with.append(kind)

    def rest_client(self) -> Self:
        return self

    def list_training_runs(self, *args: Any) -> Ready:
        cursor = Cursor(offset=0, limit=20, total_count=0)
        return Ready(TrainingRunsResponse(training_runs=[], cursor=cursor))


@pytest.fixture
def created() -> list[StubService]:
    return []


@pytest.fixture
def context(created: list[StubService]) -> Context:
    def make(config: Config) -> Any:
        created.append(StubService(config))
        return created[-1]

    return Context(api_key="tml-k", base_url="http://h", timeout_seconds=7.0, make_service=make)


def test_context_options_are_passed_to_config(context: Context, created: list[StubService]) -> None:
    with service_client(context, http_pool="mine"):
        pass
    config = created[0].config
    assert (config.api_key, config.base_url, config.timeout_seconds) == ("tml-k", "http://h", 7.0)
    assert (config.key_source, config.http_pool) == ("--api-key", "mine")


def test_unreachable_server_fails_within_five_seconds() -> None:
    config = build_config(Context(base_url="http://h"))
    assert config.connect_timeout_seconds + config.first_contact_seconds <= 5.0
    assert config.key_source == ""


def test_clients_are_closed_on_success_and_error(
    context: Context, created: list[StubService]
) -> None:
    with rest_client(context), admin_client(context):
        pass
    with pytest.raises(KeyboardInterrupt), rest_client(context):
        raise KeyboardInterrupt
    assert [stub.ended_with for stub in created] == [[None], [None], [KeyboardInterrupt]]


def test_commands_use_the_injected_client(
    context: Context, created: list[StubService], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "list"], context).exit_code == 0
    assert capsys.readouterr().out == "No training runs found\n"
    assert created[0].ended_with == [None]


def test_bad_url_error_names_the_flag() -> None:
    with pytest.raises(ConfigError) as refused:
        build_config(Context(base_url="ftp://x"))
    assert describe_error(refused.value).hint == "Pass --base-url, or set TINKER_BASE_URL."


def test_missing_library_error_has_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "tinkex.client.config":
            raise ModuleNotFoundError("No module named 'pyqwest'", name="pyqwest")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CliError, match="pyqwest") as refused:
        build_config(Context())
    assert refused.value.hint == f"Run: {install_command()}"
