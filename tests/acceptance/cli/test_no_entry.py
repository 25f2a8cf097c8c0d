"""Errors for a rejected key, a missing key and an unreachable server."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace

import pytest

from tests.acceptance.cli.conftest import Ours, User
from tests.support.real_server import RealServer
from tinkex.server.http.request_context import ACCEPTED_KEY_TTL_SECONDS

WRONG = "tml-wrong-0123456789"


def without(user: User, *names: str, **more: str) -> Ours:
    """Return the user's `tinkex` with changed environment variables."""
    environment = {name: value for name, value in user.environment.items() if name not in names}
    return replace(user.ours, environment=environment | more)


@pytest.mark.parametrize("by", ["flag", "variable", "own variable", "profile"])
def test_rejected_key_names_its_source(by: str, user: User) -> None:
    ours = without(user, "TINKER_API_KEY")
    words, source = ["run", "list"], "--api-key"
    if by == "flag":
        words += ["--api-key", WRONG]
    elif by == "variable":
        ours, source = without(user, TINKER_API_KEY=WRONG), "TINKER_API_KEY"
    elif by == "own variable":
        ours, source = without(user, TINKEX_API_KEY=WRONG), "TINKEX_API_KEY"
    else:
        file = user.directory / ".tinkex" / "config.toml"
        file.parent.mkdir()
        file.write_text(f'[profiles.work]\napi_key = "{WRONG}"\n')
        words, source = [*words, "--profile", "work"], f"profile 'work' in {file}"
    said = ours(*words, status=1)
    assert said.stdout == ""
    assert said.stderr.startswith("Error: Authentication failed: ")
    assert f"refused the key from {source}." in said.stderr
    error = json.loads(ours(*words, "--json", status=1).stderr)["error"]
    assert (error["status"], error["category"]) == (401, "user")
    assert WRONG not in said.stderr


def test_server_without_key_is_an_error(user: User) -> None:
    said = without(user, "TINKER_API_KEY")("run", "list", status=1)
    assert said.stderr.startswith("Error: ")
    assert "--api-key" in said.stderr


@pytest.mark.parametrize("words", [("run", "list"), ("model", "list"), ("sample", "--prompt", "x")])
def test_unreachable_server_error_suggests_serve(words: tuple[str, ...], user: User) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        said = user.ours(*words, "--base-url", url, status=1)
        error = json.loads(user.ours(*words, "--base-url", url, "--json", status=1).stderr)["error"]
    assert "Error: Connection failed: cannot reach 127.0.0.1:" in said.stderr
    assert "`tinkex serve` starts one" in error["hint"]


def test_silent_server_times_out(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        said = user.ours("run", "list", "--base-url", url, status=1)
    assert "Error: Request timeout: 127.0.0.1:" in said.stderr
    assert "within 4.5 s" in said.stderr


def test_created_key_is_accepted(user: User, cli_server: RealServer) -> None:
    made = user.ours.json("key", "create", "--home", str(cli_server.home), "--tenant", "new")
    ours = without(user, TINKER_API_KEY=made["key"])
    assert ours.json("run", "list")["total"] == 0
    user.ours("key", "revoke", str(made["id"]), "--home", str(cli_server.home))
    # The server caches keys for a while, without an event when the cache expires.
    time.sleep(ACCEPTED_KEY_TTL_SECONDS)
    assert "Authentication failed" in ours("run", "list", status=1).stderr
