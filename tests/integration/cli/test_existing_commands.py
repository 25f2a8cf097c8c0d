"""JSON output of `key`, `model` and `serve`, with the flag at any position."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli
from tests.support.model_folder_files import write_folder
from tinkex import clock
from tinkex.models import TINY
from tinkex.server_discovery import ServerState


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_keys_are_created_listed_and_revoked(tinkex: RunCli) -> None:
    made = tinkex("-f", "json", "key", "create", "--name", "mine").json
    assert made["key"].startswith("tml-")
    [row] = tinkex("key", "-f", "json", "list").json
    assert (row["id"], row["name"], row["revoked"]) == (made["id"], "mine", None)
    assert tinkex("key", "revoke", str(made["id"]), "--json").json == {
        "id": made["id"],
        "revoked": True,
    }
    again = tinkex("key", "revoke", str(made["id"]), "--json")
    assert again.exit_code == 1
    assert "no active key" in again.failure["message"]
    shown = tinkex("key", "list").out
    assert "mine" in shown
    # Tables show a relative time, JSON an ISO time.
    assert shown.count("just now") == 2
    [row] = tinkex("key", "list", "--json").json
    for name in ("created", "revoked"):
        assert datetime.fromisoformat(row[name]).tzinfo is not None
    assert made["key"] not in shown


def test_new_key_is_the_only_stdout(tinkex: RunCli) -> None:
    result = tinkex("key", "create")
    assert result.out.startswith("tml-")
    assert len(result.out.split()) == 1


def test_model_is_added_listed_described_and_removed(tinkex: RunCli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small")
    added = tinkex("--json", "model", "add", "mine", str(folder)).json
    assert (added["name"], added["folder"], added["parameters"]) == ("mine", str(folder), 44)
    assert [row["name"] for row in tinkex("model", "list", "-f", "json").json] == ["mine", TINY]
    assert tinkex("model", "info", "mine", "-f", "json").json["parameters"] == 44
    assert tinkex("model", "remove", "mine", "--json").json == {"name": "mine", "removed": True}
    assert [row["name"] for row in tinkex("model", "list", "--json").json] == [TINY]


def test_status_shows_relative_start_time(tinkex: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    began = clock.now() - 7200
    state = ServerState(url="http://127.0.0.1:9", pid=1, version="1", started_at=began)
    monkeypatch.setattr("tinkex.server_discovery.find_server", lambda home: state)
    shown = tinkex("serve", "status").out
    assert "2 hours ago" in shown
    assert "running" in shown
    started = tinkex("serve", "status", "--json").json["started"]
    assert datetime.fromisoformat(started).timestamp() == int(began)


def test_status_of_stopped_server(tinkex: RunCli, home: Path) -> None:
    status = tinkex("serve", "status", "--json")
    assert status.exit_code == 1
    assert '"status": "stopped"' in status.out
    stopped = tinkex("-f", "json", "serve", "stop")
    assert (stopped.exit_code, stopped.err) == (1, "")
    assert '"stopped": false' in stopped.out
    assert "no server log" in tinkex("serve", "logs", "--json").failure["message"]


def test_logs_as_json(tinkex: RunCli, home: Path) -> None:
    log = home / "logs" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthree\n")
    found = tinkex("serve", "logs", "-n", "2", "--json").json
    assert found == {"log": str(log), "lines": ["two", "three"]}
    assert tinkex("serve", "logs", "--follow", "--json").exit_code == 2
    assert tinkex("serve", "logs", "-n", "1").out == "three\n"


def test_serve_keeps_its_own_api_key(tinkex: RunCli) -> None:
    shown = tinkex("serve", "--help").out
    assert "API key that clients must send" in shown
    assert "API key to send" not in shown


def test_quotas_of_a_tenant(tinkex: RunCli) -> None:
    tinkex("key", "create", "--tenant", "alice")
    unset = tinkex("-f", "json", "key", "quota", "--tenant", "alice").json
    assert set(unset["quotas"].values()) == {None}
    words = ("key", "quota", "--tenant", "alice", "--models", "4", "--stored-bytes", "0")
    assert tinkex("-f", "json", *words).json["quotas"]["models"] == 4
    more = tinkex("-f", "json", "key", "quota", "--tenant", "alice", "--checkpoints", "9").json
    assert more == {
        "tenant": "alice",
        "quotas": {
            "models": 4,
            "checkpoints": 9,
            "stored_bytes": 0,
            "tokens_per_hour": None,
            "sessions_per_hour": None,
        },
    }
    shown = tinkex("key", "quota", "--tenant", "alice").out
    assert "unlimited" in shown
    assert "server default" in shown
    reset = tinkex("-f", "json", "key", "quota", "--tenant", "alice", "--reset").json
    assert set(reset["quotas"].values()) == {None}
    unknown = tinkex("key", "quota", "--tenant", "nobody")
    assert unknown.exit_code != 0
    assert "no tenant is named 'nobody'" in unknown.err
