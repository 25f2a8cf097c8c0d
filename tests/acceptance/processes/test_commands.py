"""`tinkex serve status|stop|logs` and `tinkex key`, with and without a running server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import (
    TIMEOUT_SECONDS,
    eventually,
    post,
    run_tinkex,
    submit_slow_job,
)
from tinkex.server_discovery import find_lock_holder


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """The default home of commands."""
    monkeypatch.setenv("TINKEX_HOME", str(home))
    return home


def status_of_key(url: str, key: str) -> int:
    """The status of a request with this key."""
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    return post(url, "create_session", key, body)[0]


# --- about a server -----------------------------------------------------------------------------


def test_commands_report_missing_server(at_home: Path) -> None:
    status = run_tinkex("serve", "status")
    assert status.returncode == 1
    assert "stopped" in status.stdout
    as_json = run_tinkex("serve", "status", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout) == {"status": "stopped", "home": str(at_home)}
    stop = run_tinkex("serve", "stop")
    assert (stop.returncode, stop.stderr) == (1, f"no server is running in {at_home}\n")
    logs = run_tinkex("serve", "logs")
    assert logs.returncode == 1
    assert f"no server log in {at_home}" in logs.stderr
    # The status command does not create a home.
    assert not at_home.exists()


def test_status_and_stop(serve: Serve, home: Path) -> None:
    serve_process = serve(home)
    url = serve_process.ready()
    as_json = run_tinkex("serve", "status", "--json", "--home", str(home))
    assert as_json.returncode == 0
    status = json.loads(as_json.stdout)
    assert (status["status"], status["url"], status["pid"]) == ("running", url, serve_process.pid)
    table = run_tinkex("serve", "--home", str(home), "status")
    assert table.returncode == 0
    assert url in table.stdout
    # It runs in the foreground, so its log is on its own stderr.
    logs = run_tinkex("serve", "logs", "--home", str(home))
    assert logs.returncode == 1
    assert "its own terminal" in logs.stderr
    stop = run_tinkex("serve", "stop", "--home", str(home))
    assert (stop.returncode, stop.stdout) == (0, "")
    assert serve_process.ended() == 0
    assert find_lock_holder(serve_process.home) is None


def test_force_stop_of_busy_server(serve: Serve, home: Path) -> None:
    slow = {"TINKEX_FAKE_SECONDS": "600", "TINKEX_STOP_SECONDS": "600"}
    serve_process = serve(home, env=slow)
    submit_slow_job(serve_process, serve_process.ready())
    stop = run_tinkex("serve", "stop", "--force", "--home", str(home))
    assert stop.returncode == 0
    assert serve_process.ended() == 0


def test_logs_are_shown_and_followed(at_home: Path) -> None:
    log = at_home / "logs" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(9)))
    assert run_tinkex("serve", "logs", "-n", "2").stdout == "line 7\nline 8\n"
    command = [sys.executable, "-m", "tinkex", "serve", "logs", "-n", "1", "--follow"]
    shown = at_home / "shown"
    with shown.open("w") as output, subprocess.Popen(command, stdout=output) as following:
        eventually(lambda: shown.read_text() == "line 8\n")
        with log.open("a") as file:
            file.write("line 9\n")
        eventually(lambda: shown.read_text() == "line 8\nline 9\n")
        # A large log is rotated.
        log.rename(log.with_suffix(".1"))
        log.write_text("line 10\n")
        eventually(lambda: shown.read_text() == "line 8\nline 9\nline 10\n")
        following.send_signal(signal.SIGINT)
        assert following.wait(TIMEOUT_SECONDS) == 130


# --- keys ---------------------------------------------------------------------------------------


def test_key_commands_work_without_server(at_home: Path) -> None:
    made = run_tinkex("key", "create", "--tenant", "ann", "--name", "laptop", "--note", "hers")
    assert made.returncode == 0
    secret = made.stdout.strip()
    assert secret.startswith("tml-")
    assert "\n" not in secret
    second = json.loads(run_tinkex("key", "create", "--json").stdout)
    assert (second["tenant"], second["id"]) == ("default", 2)
    listed = json.loads(run_tinkex("key", "list", "--json").stdout)
    assert [(row["tenant"], row["name"], row["note"]) for row in listed] == [
        ("ann", "laptop", "hers"),
        ("default", "key", None),
    ]
    assert run_tinkex("key", "revoke", "1").returncode == 0
    again = run_tinkex("key", "revoke", "1")
    assert again.returncode == 1
    assert "no active key has the id 1" in again.stderr
    table = run_tinkex("key", "list").stdout
    assert secret[:8] in table
    # The key is shown only once.
    assert secret not in table
    assert secret not in run_tinkex("key", "list", "--json").stdout


def test_key_changes_apply_to_running_server(serve: Serve, at_home: Path) -> None:
    serve_process = serve(at_home)
    url = serve_process.ready()
    made = json.loads(run_tinkex("key", "create", "--tenant", "bob", "--json").stdout)
    assert status_of_key(url, made["key"]) == 200
    assert run_tinkex("key", "revoke", str(made["id"])).returncode == 0
    eventually(lambda: status_of_key(url, made["key"]) == 401)
    assert status_of_key(url, serve_process.key) == 200


@pytest.mark.parametrize("option", ["--tenant", "--name"])
@pytest.mark.parametrize("text", ["", " x", "a\nb", "x" * 201])
def test_unprintable_names_are_rejected(at_home: Path, option: str, text: str) -> None:
    from click.testing import CliRunner

    from tinkex.cli.main import main

    refused = CliRunner().invoke(main, ["key", "create", option, text])
    assert refused.exit_code == 1
    assert f"{option} is {text!r}" in refused.stderr
    assert not at_home.exists()
