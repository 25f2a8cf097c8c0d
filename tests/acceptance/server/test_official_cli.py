"""The official `tinker` command against a real server: tables, JSON and exit codes."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.acceptance.server.scenario_context import BASE_MODEL, HELLO, TIMEOUT_SECONDS, datum, step
from tests.support.official_cli import Command, official_forks
from tests.support.real_server import RealServer, clean_environment, run

SCRIPT = Path(sys.executable).with_name("tinker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The user's resources on the server."""

    session_id: str
    run_id: str
    state: str
    sampler: str


def environment_of(server: RealServer, key: str, home: Path) -> dict[str, str]:
    """The environment of a user with a key."""
    return clean_environment(
        TINKER_BASE_URL=server.url, TINKER_API_KEY=key, HOME=str(home), COLUMNS="250"
    )


@pytest.fixture(scope="module")
def forks() -> Any:
    """A process that has imported the command and forks; it ends with this one."""
    return official_forks()


@pytest.fixture(scope="module")
def key(real_server: RealServer) -> str:
    return real_server.new_key("cli")


@pytest.fixture(scope="module")
def tinker(
    forks: Any, real_server: RealServer, key: str, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    directory = tmp_path_factory.mktemp("cli")
    environment = environment_of(real_server, key, directory)
    return Command(forks=forks, directory=directory, environment=environment)


@pytest.fixture(scope="module")
def stock(real_server: RealServer, key: str) -> Iterator[Stock]:
    """A trained model with a checkpoint of each kind."""
    service = tinkex.ServiceClient(base_url=real_server.url, api_key=key)
    client = service.create_lora_training_client(BASE_MODEL, rank=8)
    step(tinkex, client)
    state = client.save_state("first", user_metadata={"note": "kept"}).result(TIMEOUT_SECONDS)
    sampler = client.save_weights_for_sampler("best").result(TIMEOUT_SECONDS)
    yield Stock(
        session_id=client.model_id.partition(":")[0],
        run_id=client.model_id,
        state=state.path,
        sampler=sampler.path,
    )
    service.close().result(TIMEOUT_SECONDS)


def save(server: RealServer, key: str, *names: str) -> list[str]:
    """Training checkpoints with these names, of a new model."""
    with tinkex.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        return [client.save_state(name).result(TIMEOUT_SECONDS).path for name in names]


def test_official_cli_version(tinker: Command) -> None:
    """Run the real script once; the forked command behaves the same."""
    script = run([str(SCRIPT), "version"], tinker.environment)
    assert script.stdout == tinker("version").stdout == "tinker 0.36.0\n"


def test_models_are_listed(tinker: Command, stock: Stock) -> None:
    assert BASE_MODEL in tinker("model", "list").stdout
    [model] = tinker.json("model", "list", "bigram")["models"]
    assert (model["model_name"], model["trainable"], model["sampleable"]) == (
        BASE_MODEL,
        True,
        True,
    )


def test_runs_are_listed_and_shown(tinker: Command, stock: Stock) -> None:
    table = tinker("run", "list").stdout
    assert stock.run_id in table and BASE_MODEL in table
    runs = tinker.json("run", "list", "--limit", "0")["runs"]
    assert stock.run_id in {run["training_run_id"] for run in runs}
    assert stock.run_id in tinker("run", "info", stock.run_id).stdout
    shown = tinker.json("run", "info", stock.run_id)
    assert (shown["base_model"], shown["lora_rank"], shown["is_lora"]) == (BASE_MODEL, 8, True)
    assert shown["last_checkpoint"]["tinker_path"] == stock.state


def test_unknown_run_is_an_error(tinker: Command) -> None:
    answer = tinker("run", "info", "no-such-run", status=1)
    assert "not found" in answer.stderr
    assert answer.stdout == ""


def test_checkpoints_are_listed_and_shown(tinker: Command, stock: Stock) -> None:
    table = tinker("checkpoint", "list", "--run-id", stock.run_id).stdout
    assert stock.state in table and stock.sampler in table
    listed = tinker.json("checkpoint", "list", "--run-id", stock.run_id)
    assert listed["run_id"] == stock.run_id
    by_path = {each["tinker_path"]: each for each in listed["checkpoints"]}
    assert by_path.keys() == {stock.state, stock.sampler}
    assert by_path[stock.state]["checkpoint_type"] == "training"
    assert by_path[stock.state]["user_metadata"] == {"note": "kept"}
    everything = tinker.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert by_path.keys() <= {each["tinker_path"] for each in everything}
    assert "first" in tinker("checkpoint", "info", stock.state).stdout
    shown = tinker.json("checkpoint", "info", stock.state)
    assert (shown["tinker_path"], shown["lora_rank"]) == (stock.state, 8)
    assert "not found" in tinker("checkpoint", "info", stock.state + "x", status=1).stderr


def test_checkpoint_is_published_and_unpublished(
    tinker: Command, stock: Stock, real_server: RealServer
) -> None:
    stranger = tinkex.RestClient(base_url=real_server.url, api_key=real_server.new_key("cli-other"))
    tinker("checkpoint", "publish", stock.state)
    assert tinker.json("checkpoint", "info", stock.state)["public"] is True
    assert (
        stranger.get_weights_info_by_tinker_path(stock.state).result(TIMEOUT_SECONDS).lora_rank == 8
    )
    tinker("checkpoint", "unpublish", stock.state)
    assert tinker.json("checkpoint", "info", stock.state)["public"] is False
    with pytest.raises(tinkex.NotFoundError):
        stranger.get_weights_info_by_tinker_path(stock.state).result(TIMEOUT_SECONDS)


def test_checkpoint_ttl_is_set_and_removed(tinker: Command, stock: Stock) -> None:
    tinker("checkpoint", "set-ttl", stock.sampler, "--ttl", "7200")
    expires = tinker.json("checkpoint", "info", stock.sampler)["expires_at"]
    left = datetime.fromisoformat(expires) - datetime.now(UTC)
    assert timedelta(hours=1) < left <= timedelta(hours=2)
    tinker("checkpoint", "set-ttl", stock.sampler, "--remove")
    assert tinker.json("checkpoint", "info", stock.sampler)["expires_at"] is None


def test_a_checkpoint_is_downloaded(tinker: Command, stock: Stock, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    answer = tinker.json("checkpoint", "download", stock.state, "-o", str(tmp_path / "json"))
    assert answer["checkpoint_path"] == stock.state
    files = {path.name: path for path in Path(answer["destination"]).rglob("*") if path.is_file()}
    assert json.loads(files["adapter_config.json"].read_text())["r"] == 8
    assert load_file(files["adapter_model.safetensors"])
    manifest = json.loads(files["manifest.json"].read_text())["files"]
    assert {name: files[name].stat().st_size for name in manifest} == {
        name: entry["size"] for name, entry in manifest.items()
    }
    # The temporary copy for the download is deleted, and its session has finished.
    left = tinker.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert all(each["checkpoint_type"] != "external" for each in left)
    assert "sampler" in tinker("checkpoint", "download", stock.sampler, status=1).stderr


def test_checkpoints_are_deleted(tinker: Command, real_server: RealServer, key: str) -> None:
    one, two, three = save(real_server, key, "one", "two", "three")
    assert "1" in tinker("checkpoint", "delete", one, "--yes").stdout
    answer = tinker.json("checkpoint", "delete", two, one, "--yes")
    assert answer["deleted_count"] == 1
    assert [each["tinker_path"] for each in answer["failed"]] == [one]
    run_id = three.removeprefix("tinker://").partition("/")[0]
    [left] = tinker.json("checkpoint", "list", "--run-id", run_id)["checkpoints"]
    assert left["tinker_path"] == three
    assert tinker.json("checkpoint", "delete", "--run-id", run_id, "-y")["deleted_count"] == 1
    assert tinker.json("checkpoint", "list", "--run-id", run_id)["checkpoints"] == []


def test_a_session_is_exported(tinker: Command, stock: Stock, tmp_path: Path) -> None:
    target = tmp_path / "session.pftrace"
    answer = tinker.json("session", "export-trace", stock.session_id, "-o", str(target))
    assert answer["file_size_bytes"] == target.stat().st_size
    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"]}
    assert {"forward_backward", "optim_step"} <= names
    url = tinker("session", "export-trace", stock.session_id, "--url-only").stdout.strip()
    assert url.startswith("http://")
    assert "not found" in tinker("session", "export-trace", "no-such", status=1).stderr


def test_usage_is_reported(tinker: Command, stock: Stock, tmp_path: Path) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = [(hour + timedelta(hours=add)).strftime("%Y-%m-%dT%H:00:00Z") for add in (-1, 2)]
    usage = tinker.json("billing", "usage", *span)
    trained = [
        each["event_info"] for each in usage["data"] if each["session_id"] == stock.session_id
    ]
    tokens = {each["type"]: each.get("token_count") for each in trained}
    assert tokens["training"] == len(HELLO) - 1
    target = tmp_path / "usage.csv"
    tinker("billing", "usage", *span, "--csv", str(target))
    with target.open(newline="") as file:
        assert stock.session_id in {row["session_id"] for row in csv.DictReader(file)}
    stored = tinker.json("billing", "checkpoint-storage")["data"]
    assert sum(row["checkpoint_count"] for row in stored) >= 2
    assert "Error" in tinker("billing", "usage", span[1], span[0], status=1).stderr


def test_exit_codes_of_invalid_key_and_usage_error(
    real_server: RealServer, tinker: Command, tmp_path: Path
) -> None:
    wrong = environment_of(real_server, "tml-wrong", tmp_path)
    intruder = replace(tinker, directory=tmp_path, environment=wrong)
    answer = intruder("run", "list", status=1)
    assert "Authentication" in answer.stderr or "401" in answer.stderr, answer.stderr
    tinker("no-such-command", status=2)


def test_login_and_logout(real_server: RealServer, tinker: Command, tmp_path: Path) -> None:
    """The key is stored on login, used without a variable, and removed on logout."""
    secret = real_server.new_key("cli-login")
    environment = environment_of(real_server, secret, tmp_path)
    del environment["TINKER_API_KEY"]
    run([str(SCRIPT), "auth", "login"], environment, cwd=tmp_path, stdin_text=f"{secret}\n")
    file = tmp_path / ".tinker" / "credentials.json"
    assert secret in file.read_text()
    user = replace(tinker, directory=tmp_path, environment=environment)
    assert user.json("run", "list") == {"runs": []}
    user("auth", "status")
    # Logout revokes a key that was created for the command, but not a pasted one.
    file.write_text(file.read_text().replace("manual", "generated"))
    user("auth", "logout")
    user("auth", "status", status=1)
    with pytest.raises(tinkex.AuthenticationError):
        tinkex.RestClient(base_url=real_server.url, api_key=secret).list_sessions().result(
            TIMEOUT_SECONDS
        )


def test_cli_reads_while_training_runs(real_server: RealServer, key: str, tinker: Command) -> None:
    """Sessions of the command do not affect other sessions."""
    with tinkex.ServiceClient(base_url=real_server.url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        path = client.save_state("now").result(TIMEOUT_SECONDS).path
        tinker("checkpoint", "info", path)
        output = client.forward([datum(tinkex, HELLO)], "cross_entropy").result(TIMEOUT_SECONDS)
        assert output.metrics["loss:sum"] > 0
