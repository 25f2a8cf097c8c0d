"""`tinkex` and the official CLI agree about the same server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tinkex
from tests.acceptance.cli.conftest import User
from tests.acceptance.server.scenario_context import BASE_MODEL, TIMEOUT_SECONDS, step


class Stock(NamedTuple):
    """Resources of the user on the server."""

    session_id: str
    run_id: str
    states: list[str]
    sampler: str


@pytest.fixture
def stock(user: User) -> Iterator[Stock]:
    """A trained model with training and sampler checkpoints."""
    with tinkex.ServiceClient(base_url=user.url, api_key=user.key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        step(tinkex, client)
        saving = [client.save_state(name) for name in ("one", "two", "three", "four")]
        states = [each.result(TIMEOUT_SECONDS).path for each in saving]
        sampler = client.save_weights_for_sampler("best").result(TIMEOUT_SECONDS).path
        yield Stock(client.model_id.partition(":")[0], client.model_id, states, sampler)


def instant(value: str) -> object:
    """Parse a time, because the official CLI writes it with a space."""
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return value


def missing(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """Return the fields of the official output that are missing or different in ours."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            each
            for key, value in theirs.items()
            for each in missing(ours.get(key, "nothing"), value, f"{place}.{key}")
        ]
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for n, (o, t) in pairs for each in missing(o, t, f"{place}[{n}]")]
    same = ours == theirs
    if place.endswith(".gigabyte_hours"):
        # Storage cost grows over time, and our command ran later.
        same = ours >= theirs
    if isinstance(ours, str) and isinstance(theirs, str):
        same = instant(ours) == instant(theirs)
    return [] if same else [f"{place}: {ours!r} is not {theirs!r}"]


def are_iso(value: Any) -> bool:
    """Whether every time in our output is ISO 8601 with an offset."""
    if isinstance(value, dict | list):
        return all(map(are_iso, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str) and isinstance(found := instant(value), datetime) and ":" in value:
        return "T" in value and found.tzinfo is not None
    return True


def test_read_commands_match_official_cli(user: User, stock: Stock) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = [(hour + timedelta(hours=add)).strftime("%Y-%m-%dT%H:00:00Z") for add in (-1, 2)]
    for words in (
        ("model", "list"),
        ("model", "list", "bigram"),
        ("run", "list"),
        ("run", "list", "--limit", "0"),
        ("run", "list", "-c", "id,owner,checkpoint"),
        ("run", "info", stock.run_id),
        ("checkpoint", "list"),
        ("checkpoint", "list", "--limit", "2"),
        ("checkpoint", "list", "--run-id", stock.run_id),
        ("checkpoint", "info", stock.sampler),
        ("checkpoint", "info", stock.states[0]),
        ("billing", "usage", *span),
        ("billing", "checkpoint-storage"),
    ):
        theirs, ours = user.theirs.json(*words), user.ours.json(*words)
        assert missing(ours, theirs) == [], words
        assert are_iso(ours), words


def test_empty_server_matches_official_cli(user: User) -> None:
    for words in (("run", "list"), ("checkpoint", "list")):
        assert missing(user.ours.json(*words), user.theirs.json(*words)) == [], words


def test_write_commands_match_official_cli(user: User, stock: Stock) -> None:
    def info(path: str) -> Any:
        return user.ours.json("checkpoint", "info", path)

    mine, other = stock.states[:2]
    user.theirs("checkpoint", "publish", other)
    assert user.ours.json("checkpoint", "publish", mine)["public"] is True
    assert info(mine)["public"] is info(other)["public"] is True
    user.theirs("checkpoint", "unpublish", other)
    assert user.ours.json("checkpoint", "unpublish", mine)["public"] is False
    assert info(mine)["public"] is info(other)["public"] is False
    user.theirs("checkpoint", "set-ttl", other, "--ttl", "7200")
    user.ours("checkpoint", "set-ttl", mine, "--ttl", "7200")
    ends = [datetime.fromisoformat(info(path)["expires_at"]) for path in (mine, other)]
    assert abs(ends[0] - ends[1]) < timedelta(minutes=2)
    user.theirs("checkpoint", "set-ttl", other, "--remove")
    user.ours("checkpoint", "set-ttl", mine, "--remove")
    assert info(mine)["expires_at"] is info(other)["expires_at"] is None


def test_delete_matches_official_cli_except_exit_code(user: User, stock: Stock) -> None:
    one, two, three, four = stock.states
    theirs = user.theirs.json("checkpoint", "delete", one, "--yes")
    assert missing(user.ours.json("checkpoint", "delete", two, "--yes"), theirs) == []
    theirs = user.theirs.json("checkpoint", "delete", one, three, "--yes")
    ours = user.ours.json("checkpoint", "delete", two, four, "--yes", status=1)
    assert ours["deleted_count"] == theirs["deleted_count"] == 1
    assert [each["tinker_path"] for each in theirs["failed"]] == [one]
    assert [each["tinker_path"] for each in ours["failed"]] == [two]
    assert all(each["error"] for each in ours["failed"])


def test_download_and_trace_match_official_cli(user: User, stock: Stock, tmp_path: Path) -> None:
    path = stock.states[0]
    theirs = user.theirs.json("checkpoint", "download", path, "-o", str(tmp_path / "theirs"))
    ours = user.ours.json("checkpoint", "download", path, "-o", str(tmp_path / "ours"))
    assert ours.keys() >= theirs.keys()
    assert ours["checkpoint_path"] == theirs["checkpoint_path"] == path
    fetched = [
        {file.name: file.stat().st_size for file in Path(one["destination"]).rglob("*.safetensors")}
        for one in (ours, theirs)
    ]
    assert fetched[0]["adapter_model.safetensors"] == fetched[1]["adapter_model.safetensors"]
    files = tmp_path / "theirs.json", tmp_path / "ours.json"
    words = ("session", "export-trace", stock.session_id, "-o")
    theirs = user.theirs.json(*words, str(files[0]))
    ours = user.ours.json(*words, str(files[1]))
    assert ours.keys() >= theirs.keys()
    names = [{event["name"] for event in json.loads(f.read_text())["traceEvents"]} for f in files]
    assert names[0] == names[1] >= {"forward_backward", "optim_step"}
    # Neither CLI left an export on the server.
    left = user.ours.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert {each["tinker_path"] for each in left} == {*stock.states, stock.sampler}


@pytest.mark.parametrize(
    ("words", "status", "official_status"),
    [
        (("run", "info", "nosuch"), 1, 1),
        (("checkpoint", "info", "tinker://nosuch/weights/1"), 1, 1),
        (("checkpoint", "info", "nonsense"), 1, 1),
        (("session", "export-trace", "nosuch"), 1, 1),
        (("nosuch",), 2, 2),
        (("run", "nosuch"), 2, 2),
        (("run", "list", "--nosuch"), 2, 2),
        (("run", "info"), 2, 2),
        (("run",), 2, 2),
        # An invalid argument is a usage error at every position.
        (("run", "list", "-c", "nosuch"), 2, 1),
    ],
)
def test_exit_codes(words: tuple[str, ...], status: int, official_status: int, user: User) -> None:
    assert user.theirs(*words, status=official_status).stderr
    done = user.ours(*words, status=status)
    assert (done.stdout, bool(done.stderr)) == ("", True)
