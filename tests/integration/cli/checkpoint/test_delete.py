"""`checkpoint delete` against a server: selection, confirmation, failures, interrupts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.cli.conftest import CliResult, RunCli, SeededServer
from tests.integration.cli.test_official_shapes import OFFICIAL
from tests.integration.conftest import TIMEOUT_SECONDS
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
    """Empty stdin, unless a test replaces it."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


def remaining_paths(tinkex: RunCli) -> set[str]:
    """Return the remaining checkpoints."""
    found = tinkex("checkpoint", "list", "--limit", "0", "--json").json
    return {saved["tinker_path"] for saved in found["checkpoints"]}


def result(done: CliResult) -> Any:
    """Parse the result, also of a partly failed command."""
    return json.loads(done.out)


# --- choosing ---------------------------------------------------------------------------------


def test_paths_are_deleted_once_each(seeded: SeededServer, tinkex: RunCli) -> None:
    """The result has the official fields and more."""
    words = (seeded.training, seeded.sampler, seeded.training, "--yes", "--json")
    done = tinkex("checkpoint", "delete", *words).json
    assert done == OF_NOTHING | {"deleted_count": 2, "deleted": [seeded.training, seeded.sampler]}
    assert remaining_paths(tinkex) == set()
    assert len(seeded.server.calls("delete_checkpoint")) == 2


def test_summary_goes_to_stderr(seeded: SeededServer, tinkex: RunCli) -> None:
    done = tinkex("checkpoint", "delete", "-y", seeded.training)
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
def test_filters_select_checkpoints(
    words: tuple[str, ...], gone: set[str], seeded: SeededServer, tinkex: RunCli
) -> None:
    both = {"training": seeded.training, "sampler": seeded.sampler}
    asked = [seeded.run_ids[1] if word == "RUN" else word for word in words]
    done = tinkex("checkpoint", "delete", *asked, "-y", "--json").json
    assert set(done["deleted"]) == {both[name] for name in gone}
    assert remaining_paths(tinkex) == {path for name, path in both.items() if name not in gone}


def test_no_match_is_not_a_failure(seeded: SeededServer, tinkex: RunCli) -> None:
    """The command does not ask for confirmation either."""
    done = tinkex("checkpoint", "delete", "--run-id", seeded.run_ids[0])
    assert (done.exit_code, done.out) == (0, "")
    assert done.err == "No checkpoints match; nothing was deleted.\n"
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
def test_invalid_option_combination_is_a_usage_error(
    words: tuple[str, ...], seeded: SeededServer, tinkex: RunCli
) -> None:
    done = tinkex("checkpoint", "delete", *words)
    assert (done.exit_code, done.out) == (2, "")
    assert "pydantic" not in done.err
    assert len(remaining_paths(tinkex)) == 2


def test_invalid_path_deletes_nothing(seeded: SeededServer, tinkex: RunCli) -> None:
    done = tinkex("checkpoint", "delete", "-y", seeded.training, "weights/0001")
    assert done.exit_code == 1
    assert "Invalid tinker path: 'weights/0001'" in done.err
    assert len(remaining_paths(tinkex)) == 2


# --- asking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "goes"), [("y\n", True), ("yes\n", True), ("no\n", False)])
def test_confirmation_lists_checkpoints(
    typed: str, goes: bool, seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = tinkex("checkpoint", "delete", seeded.training, seeded.sampler)
    assert (done.exit_code, done.out) == (0 if goes else 1, "")
    assert done.err.count("[y/N]") == 1
    assert "Will delete 2 checkpoints (" in done.err
    assert "B):" in done.err.splitlines()[0]
    for text in (seeded.training, seeded.sampler, "This cannot be undone."):
        assert text in done.err
    assert len(remaining_paths(tinkex)) == (0 if goes else 2)


@pytest.mark.parametrize("words", [("PATH",), ("--type", "training")])
def test_closed_stdin_declines_and_fails(
    words: tuple[str, ...], seeded: SeededServer, tinkex: RunCli
) -> None:
    asked = [seeded.training if word == "PATH" else word for word in words]
    done = tinkex("checkpoint", "delete", *asked, "--json")
    assert done.exit_code == 1
    assert result(done) == OF_NOTHING | {"cancelled": True}
    assert "Cancelled." in done.err
    assert len(remaining_paths(tinkex)) == 2


def test_confirmation_marks_unknown_checkpoints(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    missing = ["tinker://nobody/weights/1", seeded.training + "x"]
    done = tinkex("checkpoint", "delete", seeded.training, *missing)
    assert done.exit_code == 1
    assert "(at least " in done.err
    for path in missing:
        assert f"{path}\n    not found" in done.err
    assert remaining_paths(tinkex) == {seeded.sampler}


# --- failing in part --------------------------------------------------------------------------


def test_deletion_continues_after_failure(seeded: SeededServer, tinkex: RunCli) -> None:
    missing = seeded.training + "x"
    done = tinkex("checkpoint", "delete", "-y", missing, seeded.training, seeded.sampler, "--json")
    assert done.exit_code == 1
    found = result(done)
    assert (found["deleted_count"], found["deleted"]) == (2, [seeded.training, seeded.sampler])
    assert [failed["tinker_path"] for failed in found["failed"]] == [missing]
    assert found["failed"][0]["error"].startswith("Resource not found: ")
    shown = tinkex("checkpoint", "delete", "-y", missing)
    assert (shown.exit_code, shown.out) == (1, "")
    assert f"Failed to delete (1):\n  {missing}: Resource not found" in shown.err


def test_unknown_run_is_an_error(seeded: SeededServer, tinkex: RunCli) -> None:
    done = tinkex("checkpoint", "delete", "--run-id", "nobody", "-y", "--json")
    assert (done.exit_code, done.failure["status"]) == (1, 404)


def test_rejected_key_is_reported_once(seeded: SeededServer, tinkex: RunCli) -> None:
    words = (seeded.training, seeded.sampler, "--api-key", "tml-wrong", "--json")
    done = tinkex("checkpoint", "delete", "-y", *words)
    assert (done.exit_code, done.failure["status"]) == (1, 401)
    assert len(remaining_paths(tinkex)) == 2


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official command line is not installed")
def test_json_matches_official_cli(seeded: SeededServer, tinkex: RunCli) -> None:
    """Unlike the official CLI, tinkex fails if a deletion fails."""
    missing = seeded.training + "x"
    theirs = subprocess.run(
        [OFFICIAL, "-f", "json", "checkpoint", "delete", "-y", seeded.sampler, missing],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    ours = result(tinkex("checkpoint", "delete", "-y", seeded.training, missing, "--json"))
    official = json.loads(theirs.stdout)
    assert official.keys() <= ours.keys()
    assert official["deleted_count"] == ours["deleted_count"] == 1
    assert official["failed"][0].keys() == ours["failed"][0].keys()
    assert official["failed"][0]["tinker_path"] == ours["failed"][0]["tinker_path"] == missing


# --- being interrupted ------------------------------------------------------------------------


def interrupted(seeded: SeededServer, *paths: str) -> CliResult:
    """Press Ctrl-C when all deletions have reached the server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "checkpoint", "delete", "-y", "--json", *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    seeded.server.wait_for("delete_checkpoint", len(paths), TIMEOUT_SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return CliResult(process.returncode, out, err, None)


def test_ctrl_c_reports_outcomes(seeded: SeededServer) -> None:
    seeded.server.inject(
        "delete_checkpoint",
        Fault(delay_seconds=60.0),
        times=None,
        match=lambda call: "sampler" in call.ids["checkpoint_id"],
    )
    done = interrupted(seeded, seeded.training, seeded.sampler)
    assert done.exit_code == 130
    assert result(done) == OF_NOTHING | {
        "deleted_count": 1,
        "deleted": [seeded.training],
        "unknown": [seeded.sampler],
        "interrupted": True,
    }
    assert "Traceback" not in done.err


def test_deletions_run_concurrently(seeded: SeededServer) -> None:
    """All requests reach the server before the first response."""
    seeded.server.inject("delete_checkpoint", Fault(delay_seconds=60.0), times=None)
    paths = [f"{seeded.training}{number}" for number in range(20)]
    assert result(interrupted(seeded, *paths))["unknown"] == paths
