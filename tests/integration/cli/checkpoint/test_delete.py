"""`checkpoint delete` against a server: choosing, asking, failing in part, being interrupted."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.cli.conftest import Done, Scene, Tinkex
from tests.integration.cli.test_official_shapes import OFFICIAL
from tests.integration.conftest import PATIENCE
from tinkex.testing import Fault

OF_NOTHING = {
    "deleted_count": 0,
    "failed": [],
    "deleted": [],
    "unknown": [],
    "not_tried": [],
    "interrupted": False,
}


@pytest.fixture(autouse=True)
def closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers, unless a test does."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


def left(tinkex: Tinkex) -> set[str]:
    """What is still there."""
    found = tinkex("checkpoint", "list", "--limit", "0", "--json").json
    return {saved["tinker_path"] for saved in found["checkpoints"]}


def result(done: Done) -> Any:
    """The result, also of a command that failed in part."""
    return json.loads(done.out)


# --- choosing ---------------------------------------------------------------------------------


def test_paths_are_deleted_once_each(scene: Scene, tinkex: Tinkex) -> None:
    """S3-14, S3-20: the official fields, and more."""
    words = (scene.training, scene.sampler, scene.training, "--yes", "--json")
    done = tinkex("checkpoint", "delete", *words).json
    assert done == OF_NOTHING | {"deleted_count": 2, "deleted": [scene.training, scene.sampler]}
    assert left(tinkex) == set()
    assert len(scene.server.calls("delete_checkpoint")) == 2


def test_people_are_told_on_stderr(scene: Scene, tinkex: Tinkex) -> None:
    done = tinkex("checkpoint", "delete", "-y", scene.training)
    assert (done.exit_code, done.out, done.err) == (0, "", "Deleted 1 checkpoint.\n")


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (("--run-id", "RUN"), {"training", "sampler"}),
        (("--run-id", "RUN", "--type", "training"), {"training"}),
        (("--type", "sampler_weights"), {"sampler"}),
        (("--after", "2020-01-01"), {"training", "sampler"}),
        (("--run-id", "RUN", "--before", "2020-01-01T08:00:00Z"), set()),
        (("--after", "2020-01-01", "--before", "2999-01-01", "--type", "weights"), {"training"}),
        (("--type", "external"), set()),
    ],
)
def test_filters_choose(
    words: tuple[str, ...], gone: set[str], scene: Scene, tinkex: Tinkex
) -> None:
    both = {"training": scene.training, "sampler": scene.sampler}
    asked = [scene.run_ids[1] if word == "RUN" else word for word in words]
    done = tinkex("checkpoint", "delete", *asked, "-y", "--json").json
    assert set(done["deleted"]) == {both[name] for name in gone}
    assert left(tinkex) == {path for name, path in both.items() if name not in gone}


def test_that_nothing_matches_is_said_and_no_failure(scene: Scene, tinkex: Tinkex) -> None:
    """Nothing is asked either."""
    done = tinkex("checkpoint", "delete", "--run-id", scene.run_ids[0])
    assert (done.exit_code, done.out) == (0, "")
    assert done.err == "No checkpoints match: nothing was deleted.\n"
    assert tinkex("checkpoint", "delete", "--type", "external", "--json").json == OF_NOTHING


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("-y",),
        ("tinker://r/weights/1", "--run-id", "r"),
        ("tinker://r/weights/1", "--type", "training"),
        ("--type", "huge"),
        ("--before", "yesterday"),
        ("--after", "2026-13-01"),
    ],
)
def test_a_wrong_choice_is_a_usage_error(
    words: tuple[str, ...], scene: Scene, tinkex: Tinkex
) -> None:
    done = tinkex("checkpoint", "delete", *words)
    assert (done.exit_code, done.out) == (2, "")
    assert "pydantic" not in done.err
    assert len(left(tinkex)) == 2


def test_a_path_that_is_no_address_stops_all_before_anything_is_deleted(
    scene: Scene, tinkex: Tinkex
) -> None:
    done = tinkex("checkpoint", "delete", "-y", scene.training, "weights/0001")
    assert done.exit_code == 1
    assert "Invalid tinker path: 'weights/0001'" in done.err
    assert len(left(tinkex)) == 2


# --- asking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "goes"), [("y\n", True), ("yes\n", True), ("no\n", False)])
def test_it_asks_once_with_what_will_be_deleted(
    typed: str, goes: bool, scene: Scene, tinkex: Tinkex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-14, S3-G05, S3-G19."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = tinkex("checkpoint", "delete", scene.training, scene.sampler)
    assert (done.exit_code, done.out) == (0 if goes else 1, "")
    assert done.err.count("[y/N]") == 1
    assert "Will delete 2 checkpoints (" in done.err
    assert "B):" in done.err.splitlines()[0]
    for text in (scene.training, scene.sampler, "This cannot be undone."):
        assert text in done.err
    assert len(left(tinkex)) == (0 if goes else 2)


@pytest.mark.parametrize("words", [("PATH",), ("--type", "training")])
def test_a_closed_stdin_is_a_no_and_a_failure(
    words: tuple[str, ...], scene: Scene, tinkex: Tinkex
) -> None:
    """S3-G19, S3-30."""
    asked = [scene.training if word == "PATH" else word for word in words]
    done = tinkex("checkpoint", "delete", *asked, "--json")
    assert done.exit_code == 1
    assert result(done) == OF_NOTHING | {"cancelled": True}
    assert "Cancelled." in done.err
    assert len(left(tinkex)) == 2


def test_the_question_says_what_is_not_there(
    scene: Scene, tinkex: Tinkex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    missing = ["tinker://nobody/weights/1", scene.training + "x"]
    done = tinkex("checkpoint", "delete", scene.training, *missing)
    assert done.exit_code == 1
    assert "(at least " in done.err
    for path in missing:
        assert f"{path}\n    not found" in done.err
    assert left(tinkex) == {scene.sampler}


# --- failing in part --------------------------------------------------------------------------


def test_it_goes_on_after_a_failure_and_fails_in_the_end(scene: Scene, tinkex: Tinkex) -> None:
    missing = scene.training + "x"
    done = tinkex("checkpoint", "delete", "-y", missing, scene.training, scene.sampler, "--json")
    assert done.exit_code == 1
    found = result(done)
    assert (found["deleted_count"], found["deleted"]) == (2, [scene.training, scene.sampler])
    assert [failed["tinker_path"] for failed in found["failed"]] == [missing]
    assert found["failed"][0]["error"].startswith("Resource not found: ")
    shown = tinkex("checkpoint", "delete", "-y", missing)
    assert (shown.exit_code, shown.out) == (1, "")
    assert f"Failed to delete (1):\n  {missing}: Resource not found" in shown.err


def test_a_run_that_is_not_there_is_a_failure(scene: Scene, tinkex: Tinkex) -> None:
    done = tinkex("checkpoint", "delete", "--run-id", "nobody", "-y", "--json")
    assert (done.exit_code, done.failure["status"]) == (1, 404)


def test_a_wrong_key_is_said_once(scene: Scene, tinkex: Tinkex) -> None:
    words = (scene.training, scene.sampler, "--api-key", "tml-wrong", "--json")
    done = tinkex("checkpoint", "delete", "-y", *words)
    assert (done.exit_code, done.failure["status"]) == (1, 401)
    assert len(left(tinkex)) == 2


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official command line is not installed")
def test_the_official_command_line_gives_the_same_fields(scene: Scene, tinkex: Tinkex) -> None:
    """S3-20; unlike it, ours fails when a deletion failed."""
    missing = scene.training + "x"
    theirs = subprocess.run(
        [OFFICIAL, "-f", "json", "checkpoint", "delete", "-y", scene.sampler, missing],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    ours = result(tinkex("checkpoint", "delete", "-y", scene.training, missing, "--json"))
    official = json.loads(theirs.stdout)
    assert official.keys() <= ours.keys()
    assert official["deleted_count"] == ours["deleted_count"] == 1
    assert official["failed"][0].keys() == ours["failed"][0].keys()
    assert official["failed"][0]["tinker_path"] == ours["failed"][0]["tinker_path"] == missing


# --- being interrupted ------------------------------------------------------------------------


def interrupted(scene: Scene, *paths: str) -> Done:
    """Ctrl-C when all deletions have reached the server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "checkpoint", "delete", "-y", "--json", *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    scene.server.wait_for("delete_checkpoint", len(paths), PATIENCE)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    return Done(process.returncode, out, err, None)


def test_ctrl_c_tells_what_was_deleted_and_what_may_be(scene: Scene) -> None:
    """S3-34."""
    scene.server.inject(
        "delete_checkpoint",
        Fault(delay_seconds=60.0),
        times=None,
        match=lambda call: "sampler" in call.ids["checkpoint_id"],
    )
    done = interrupted(scene, scene.training, scene.sampler)
    assert done.exit_code == 130
    assert result(done) == OF_NOTHING | {
        "deleted_count": 1,
        "deleted": [scene.training],
        "unknown": [scene.sampler],
        "interrupted": True,
    }
    assert "Traceback" not in done.err


def test_many_are_deleted_side_by_side(scene: Scene) -> None:
    """All of them reach the server although none is answered."""
    scene.server.inject("delete_checkpoint", Fault(delay_seconds=60.0), times=None)
    paths = [f"{scene.training}{number}" for number in range(20)]
    assert result(interrupted(scene, *paths))["unknown"] == paths
