"""`checkpoint publish`, `unpublish`, `set-ttl` and `copy` against a server."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest

from tests.integration.cli.conftest import Scene, Tinkex
from tinkex.cli.context import Context, Screen
from tinkex.testing import Fault

PERSON = Context(is_stdin_terminal=True, stdout=Screen(width=200))


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Type something."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def is_public(scene: Scene, tinkex: Tinkex) -> bool:
    found: bool = tinkex("checkpoint", "info", scene.training, "--json").json["public"]
    return found


# --- publish and unpublish --------------------------------------------------------------------


def test_publish_and_unpublish_say_what_is_so_now(scene: Scene, tinkex: Tinkex) -> None:
    """S3-12, S3-13, S3-G04."""
    done = tinkex("checkpoint", "publish", scene.training)
    assert (done.exit_code, done.out) == (0, "")
    assert done.err == f"{scene.training} is public now.\n"
    assert is_public(scene, tinkex)
    done = tinkex("checkpoint", "unpublish", scene.training)
    assert done.err == f"{scene.training} is private now.\n"
    assert not is_public(scene, tinkex)


def test_publishing_twice_is_no_failure(scene: Scene, tinkex: Tinkex) -> None:
    """S3-30."""
    expected = {"tinker_path": scene.training, "public": True, "changed": True}
    assert tinkex("checkpoint", "publish", scene.training, "--json").json == expected
    again = tinkex("checkpoint", "publish", scene.training, "--json").json
    assert again == expected | {"changed": False}
    assert "is public already" in tinkex("checkpoint", "publish", scene.training).err
    private = tinkex("checkpoint", "unpublish", scene.sampler, "--json").json
    assert private == {"tinker_path": scene.sampler, "public": False, "changed": False}


def test_a_conflict_for_another_reason_is_a_failure(scene: Scene, tinkex: Tinkex) -> None:
    locked = Fault(status=409, body={"detail": "locked"}, headers={"x-should-retry": "false"})
    scene.server.inject("publish_checkpoint", locked, times=None)
    done = tinkex("checkpoint", "publish", scene.training, "--json")
    assert done.exit_code == 1
    assert (done.failure["status"], "locked" in done.failure["message"]) == (409, True)


@pytest.mark.parametrize(
    ("typed", "goes"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_unpublish_asks_a_person(
    typed: str, goes: bool, scene: Scene, tinkex: Tinkex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-G19: only y or yes; nothing typed is a no."""
    tinkex("checkpoint", "publish", scene.training)
    answer(monkeypatch, typed)
    done = tinkex("checkpoint", "unpublish", scene.training, context=PERSON)
    assert (done.exit_code, done.out) == (0 if goes else 1, "")
    assert "[y/N]" in done.err
    assert ("Cancelled." in done.err) is not goes
    assert is_public(scene, tinkex) is not goes


def test_unpublish_asks_nobody_if_nobody_can_answer_or_yes_is_given(
    scene: Scene, tinkex: Tinkex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-G19."""
    tinkex("checkpoint", "publish", scene.training)
    answer(monkeypatch, "n\n")
    assert "[y/N]" not in tinkex("checkpoint", "unpublish", scene.training).err
    tinkex("checkpoint", "publish", scene.training)
    done = tinkex("checkpoint", "unpublish", "-y", scene.training, context=PERSON)
    assert (done.exit_code, "[y/N]" in done.err) == (0, False)


def test_a_cancelled_unpublish_is_json_too(
    scene: Scene, tinkex: Tinkex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-30."""
    answer(monkeypatch, "")
    done = tinkex("checkpoint", "unpublish", scene.training, "--json", context=PERSON)
    assert done.exit_code == 1
    assert '"cancelled": true' in done.out
    assert scene.server.calls("unpublish_checkpoint") == []


# --- set-ttl ----------------------------------------------------------------------------------


def test_a_lifetime_is_set_and_removed(scene: Scene, tinkex: Tinkex) -> None:
    done = tinkex("checkpoint", "set-ttl", scene.training, "--ttl", "7d")
    assert (done.out, done.err) == ("", f"{scene.training} expires in 7d 00h.\n")
    found = tinkex("checkpoint", "info", scene.training, "--json").json
    left = datetime.fromisoformat(found["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=6) < left <= timedelta(days=7)
    removed = tinkex("checkpoint", "set-ttl", scene.training, "--remove", "--json").json
    assert removed == {"tinker_path": scene.training, "ttl_seconds": None}
    assert tinkex("checkpoint", "info", scene.training, "--json").json["expires_at"] is None


def test_a_bare_number_is_in_seconds(scene: Scene, tinkex: Tinkex) -> None:
    set_to = tinkex("checkpoint", "set-ttl", scene.sampler, "--ttl", "3600", "--json").json
    assert set_to == {"tinker_path": scene.sampler, "ttl_seconds": 3600}
    assert scene.server.calls("set_checkpoint_ttl")[-1].message == {"ttl_seconds": 3600}


@pytest.mark.parametrize("words", [(), ("--ttl", "1d", "--remove"), ("--ttl", "soon")])
def test_a_lifetime_is_one_or_the_other(
    words: tuple[str, ...], scene: Scene, tinkex: Tinkex
) -> None:
    done = tinkex("checkpoint", "set-ttl", scene.training, *words)
    assert (done.exit_code, done.out) == (2, "")
    assert "--ttl" in done.err
    assert scene.server.calls("set_checkpoint_ttl") == []


# --- copy -------------------------------------------------------------------------------------


def test_a_copy_has_an_address_and_a_lifetime_of_its_own(scene: Scene, tinkex: Tinkex) -> None:
    words = ("--project-id", "p-9", "--ttl", "12h")
    copied = tinkex("checkpoint", "copy", scene.training, *words, "--json").json
    assert copied["tinker_path"] != scene.training
    assert copied == {
        "tinker_path": copied["tinker_path"],
        "source_path": scene.training,
        "project_id": "p-9",
        "ttl_seconds": 43200,
    }
    asked = scene.server.calls("copy_weights")[-1].message
    assert (asked["destination_project_id"], asked["ttl_seconds"]) == ("p-9", 43200)
    paths = tinkex("checkpoint", "list", "--json").json["checkpoints"]
    assert copied["tinker_path"] in [saved["tinker_path"] for saved in paths]
    shown = tinkex("checkpoint", "copy", scene.training).out
    assert scene.training in shown
    assert "Never" in shown


def test_the_project_of_the_environment_gets_the_copy(
    scene: Scene, tinkex: Tinkex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S0-16: Config knows it, the command does not ask for it."""
    monkeypatch.setenv("TINKER_PROJECT_ID", "p-env")
    copied = tinkex("checkpoint", "copy", scene.training, "--json").json
    assert copied["project_id"] == "p-env"
    copied = tinkex("checkpoint", "copy", scene.training, "--project-id", "p-2", "--json").json
    assert copied["project_id"] == "p-2"


def test_a_token_opens_the_checkpoint_of_another(scene: Scene, tinkex: Tinkex) -> None:
    tinkex("checkpoint", "copy", scene.training, "--access-token", "tml-other")
    sent = scene.server.calls("copy_weights")[-1].headers
    assert sent["x-tinker-weights-access-token"] == "tml-other"


@pytest.mark.parametrize("command", ["publish", "unpublish", "copy", "set-ttl"])
def test_a_checkpoint_that_is_not_there_or_no_address(
    command: str, scene: Scene, tinkex: Tinkex
) -> None:
    """S3-G04, S3-G11."""
    more = ("--remove",) if command == "set-ttl" else ()
    missing = tinkex("checkpoint", command, scene.training + "x", *more, "--json")
    assert (missing.exit_code, missing.failure["status"]) == (1, 404)
    refused = tinkex("checkpoint", command, "weights/0001", *more)
    assert refused.exit_code == 1
    assert "Invalid tinker path" in refused.err
    assert tinkex("checkpoint", command).exit_code == 2
