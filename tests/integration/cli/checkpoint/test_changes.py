"""`checkpoint publish`, `unpublish`, `set-ttl` and `copy` against a server."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tinkex.cli.context import Context, Screen
from tinkex.testing import Fault

PERSON = Context(is_stdin_terminal=True, stdout=Screen(width=200))


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Simulate typed input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def is_public(seeded: SeededServer, tinkex: RunCli) -> bool:
    found: bool = tinkex("checkpoint", "info", seeded.training, "--json").json["public"]
    return found


# --- publish and unpublish --------------------------------------------------------------------


def test_publish_and_unpublish_report_state(seeded: SeededServer, tinkex: RunCli) -> None:
    result = tinkex("checkpoint", "publish", seeded.training)
    assert (result.exit_code, result.out) == (0, "")
    assert result.err == f"{seeded.training} is public now.\n"
    assert is_public(seeded, tinkex)
    result = tinkex("checkpoint", "unpublish", seeded.training)
    assert result.err == f"{seeded.training} is private now.\n"
    assert not is_public(seeded, tinkex)


def test_publishing_twice_succeeds(seeded: SeededServer, tinkex: RunCli) -> None:
    expected = {"tinker_path": seeded.training, "public": True, "changed": True}
    assert tinkex("checkpoint", "publish", seeded.training, "--json").json == expected
    again = tinkex("checkpoint", "publish", seeded.training, "--json").json
    assert again == expected | {"changed": False}
    assert "is public already" in tinkex("checkpoint", "publish", seeded.training).err
    private = tinkex("checkpoint", "unpublish", seeded.sampler, "--json").json
    assert private == {"tinker_path": seeded.sampler, "public": False, "changed": False}


def test_other_conflict_is_an_error(seeded: SeededServer, tinkex: RunCli) -> None:
    locked = Fault(status=409, body={"detail": "locked"}, headers={"x-should-retry": "false"})
    seeded.server.inject("publish_checkpoint", locked, times=None)
    result = tinkex("checkpoint", "publish", seeded.training, "--json")
    assert result.exit_code == 1
    assert (result.failure["status"], "locked" in result.failure["message"]) == (409, True)


@pytest.mark.parametrize(
    ("typed", "goes"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_unpublish_asks_for_confirmation(
    typed: str, goes: bool, seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only y or yes confirms; empty input declines."""
    tinkex("checkpoint", "publish", seeded.training)
    answer(monkeypatch, typed)
    result = tinkex("checkpoint", "unpublish", seeded.training, context=PERSON)
    assert (result.exit_code, result.out) == (0 if goes else 1, "")
    assert "[y/N]" in result.err
    assert ("Cancelled." in result.err) is not goes
    assert is_public(seeded, tinkex) is not goes


def test_unpublish_does_not_ask_without_terminal_or_with_yes(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinkex("checkpoint", "publish", seeded.training)
    answer(monkeypatch, "n\n")
    assert "[y/N]" not in tinkex("checkpoint", "unpublish", seeded.training).err
    tinkex("checkpoint", "publish", seeded.training)
    result = tinkex("checkpoint", "unpublish", "-y", seeded.training, context=PERSON)
    assert (result.exit_code, "[y/N]" in result.err) == (0, False)


def test_cancelled_unpublish_is_json(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "")
    result = tinkex("checkpoint", "unpublish", seeded.training, "--json", context=PERSON)
    assert result.exit_code == 1
    assert '"cancelled": true' in result.out
    assert seeded.server.calls("unpublish_checkpoint") == []


# --- set-ttl ----------------------------------------------------------------------------------


def test_ttl_is_set_and_removed(seeded: SeededServer, tinkex: RunCli) -> None:
    result = tinkex("checkpoint", "set-ttl", seeded.training, "--ttl", "7d")
    assert (result.out, result.err) == ("", f"{seeded.training} expires in 7d 00h.\n")
    found = tinkex("checkpoint", "info", seeded.training, "--json").json
    left = datetime.fromisoformat(found["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=6) < left <= timedelta(days=7)
    removed = tinkex("checkpoint", "set-ttl", seeded.training, "--remove", "--json").json
    assert removed == {"tinker_path": seeded.training, "ttl_seconds": None}
    assert tinkex("checkpoint", "info", seeded.training, "--json").json["expires_at"] is None


def test_bare_ttl_is_in_seconds(seeded: SeededServer, tinkex: RunCli) -> None:
    set_to = tinkex("checkpoint", "set-ttl", seeded.sampler, "--ttl", "3600", "--json").json
    assert set_to == {"tinker_path": seeded.sampler, "ttl_seconds": 3600}
    assert seeded.server.calls("set_checkpoint_ttl")[-1].message == {"ttl_seconds": 3600}


@pytest.mark.parametrize("words", [(), ("--ttl", "1d", "--remove"), ("--ttl", "soon")])
def test_ttl_and_remove_exclude_each_other(
    words: tuple[str, ...], seeded: SeededServer, tinkex: RunCli
) -> None:
    result = tinkex("checkpoint", "set-ttl", seeded.training, *words)
    assert (result.exit_code, result.out) == (2, "")
    assert "--ttl" in result.err
    assert seeded.server.calls("set_checkpoint_ttl") == []


# --- copy -------------------------------------------------------------------------------------


def test_copy_has_own_path_and_ttl(seeded: SeededServer, tinkex: RunCli) -> None:
    words = ("--project-id", "p-9", "--ttl", "12h")
    copied = tinkex("checkpoint", "copy", seeded.training, *words, "--json").json
    assert copied["tinker_path"] != seeded.training
    assert copied == {
        "tinker_path": copied["tinker_path"],
        "source_path": seeded.training,
        "project_id": "p-9",
        "ttl_seconds": 43200,
    }
    asked = seeded.server.calls("copy_weights")[-1].message
    assert (asked["destination_project_id"], asked["ttl_seconds"]) == ("p-9", 43200)
    paths = tinkex("checkpoint", "list", "--json").json["checkpoints"]
    assert copied["tinker_path"] in [saved["tinker_path"] for saved in paths]
    shown = tinkex("checkpoint", "copy", seeded.training).out
    assert seeded.training in shown
    assert "Never" in shown


def test_copy_uses_project_of_environment(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The project comes from Config, not from an option."""
    monkeypatch.setenv("TINKER_PROJECT_ID", "p-env")
    copied = tinkex("checkpoint", "copy", seeded.training, "--json").json
    assert copied["project_id"] == "p-env"
    copied = tinkex("checkpoint", "copy", seeded.training, "--project-id", "p-2", "--json").json
    assert copied["project_id"] == "p-2"


def test_copy_with_access_token(seeded: SeededServer, tinkex: RunCli) -> None:
    tinkex("checkpoint", "copy", seeded.training, "--access-token", "tml-other")
    sent = seeded.server.calls("copy_weights")[-1].headers
    assert sent["x-tinker-weights-access-token"] == "tml-other"


@pytest.mark.parametrize("command", ["publish", "unpublish", "copy", "set-ttl"])
def test_unknown_or_invalid_path(command: str, seeded: SeededServer, tinkex: RunCli) -> None:
    more = ("--remove",) if command == "set-ttl" else ()
    missing = tinkex("checkpoint", command, seeded.training + "x", *more, "--json")
    assert (missing.exit_code, missing.failure["status"]) == (1, 404)
    refused = tinkex("checkpoint", command, "weights/0001", *more)
    assert refused.exit_code == 1
    assert "Invalid tinker path" in refused.err
    assert tinkex("checkpoint", command).exit_code == 2
