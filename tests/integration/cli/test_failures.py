"""Error messages for rejected requests, silent servers and unreachable servers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import KEY
from tinkex.errors import APIConnectionError
from tinkex.testing import Fault

WRONG = "tml-wrong"


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


@pytest.mark.parametrize(
    ("status", "title"),
    [
        (400, "Invalid request"),
        (402, "Billing issue"),
        (403, "Permission denied"),
        (404, "Resource not found"),
        (409, "API error (status 409)"),
        (422, "Invalid data provided"),
        (429, "Rate limit exceeded"),
        (500, "Internal server error"),
    ],
)
def test_error_status_is_reported(
    status: int, title: str, seeded: SeededServer, tinkex: RunCli
) -> None:
    seeded.server.inject(
        "get_training_run",
        Fault(status=status, headers={"x-should-retry": "false"}),
        times=None,
    )
    refused = tinkex("run", "info", seeded.run_ids[0])
    assert (refused.exit_code, refused.out) == (1, "")
    assert refused.err.startswith(f"Error: {title}: ")
    assert len(refused.err.splitlines()) == 2
    failure = tinkex("run", "info", seeded.run_ids[0], "--json").failure
    assert failure["status"] == status
    assert failure["hint"]


@pytest.mark.parametrize("by", ["flag", "variable", "own variable", "profile"])
def test_rejected_key_error_names_origin(
    by: str, seeded: SeededServer, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, source = ["run", "list", "--base-url", seeded.server.url], ""
    monkeypatch.delenv("TINKER_API_KEY")
    if by == "flag":
        words, source = [*words, "--api-key", WRONG], "--api-key"
    elif by == "variable":
        monkeypatch.setenv("TINKER_API_KEY", WRONG)
        source = "TINKER_API_KEY"
    elif by == "own variable":
        monkeypatch.setenv("TINKEX_API_KEY", WRONG)
        source = "TINKEX_API_KEY"
    else:
        file = tmp_path / ".tinkex" / "config.toml"
        file.parent.mkdir()
        file.write_text(f'[profiles.work]\napi_key = "{WRONG}"\n')
        words, source = [*words, "--profile", "work"], f"profile 'work' in {file}"
    refused = tinkex(*words)
    assert refused.exit_code == 1
    assert refused.err.startswith("Error: Authentication failed: ")
    assert f"refused the key from {source}." in refused.err


def test_profile_selects_server_and_key(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.delenv("TINKER_BASE_URL")
    file = tmp_path / ".tinkex" / "config.toml"
    file.parent.mkdir()
    file.write_text(
        'default_profile = "x"\n[profiles.x]\n'
        f'base_url = "{seeded.server.url}"\napi_key = "{KEY}"\n'
    )
    assert tinkex("run", "list", "--json").json["total"] == 2
    assert tinkex("--profile", "x", "run", "list", "--json").json["total"] == 2
    assert "unknown profile 'y'" in tinkex("run", "list", "--profile", "y").err


def test_unreachable_server_error_suggests_serve(tinkex: RunCli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for flags in ((), ("--json",)):
            refused = tinkex("run", "list", "--base-url", url, "--api-key", KEY, *flags)
            assert refused.exit_code == 1
            assert isinstance(refused.error, APIConnectionError)
            message = refused.failure["message"] if flags else refused.err
            assert "Connection failed: cannot reach 127.0.0.1:" in message
            assert "`tinkex serve` starts one" in refused.err


def test_timeout_is_reported(seeded: SeededServer, tinkex: RunCli) -> None:
    seeded.server.inject("get_training_run", Fault(delay_seconds=60.0), times=None)
    refused = tinkex("run", "info", seeded.run_ids[0], "--timeout", "50ms")
    assert refused.exit_code == 1
    assert refused.err.splitlines()[-2].startswith("Error: Request timeout: ")


def test_connections_are_closed_after_failure(seeded: SeededServer, tinkex: RunCli) -> None:
    before = len(seeded.server.sessions)
    assert tinkex("run", "info", "nosuch").exit_code == 1
    assert tinkex("checkpoint", "list").exit_code == 0
    assert len(seeded.server.sessions) == before


def test_verbose_prints_traceback(seeded: SeededServer, tinkex: RunCli) -> None:
    told = tinkex("run", "info", "nosuch", "-v").err
    assert "Traceback (most recent call last)" in told
    assert told.splitlines()[-2].startswith("Error: Resource not found: ")
    assert "Traceback" not in tinkex("run", "info", "nosuch").err
