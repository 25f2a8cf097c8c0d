"""`tinkex` and the official CLI print equal JSON for the same server."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.support.official_cli import Command, official_forks

OFFICIAL = Path(sys.executable).with_name("tinker")
#: Fields that only tinkex has.
ADDED = {"total", "shown"}
ADDED_TO_CHECKPOINT = {"training_run_id", "base_model"}
#: Fields of a run that only a tinkex server sends, and only tinkex prints.
ADDED_TO_RUN = {"state", "step", "metrics", "created_at"}


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


def official(*words: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        command = Command(
            forks=official_forks(), directory=Path(directory), environment=dict(os.environ)
        )
        return command.json(*words)


def without_base_models(value: Any, *, is_checkpoint: bool = False) -> Any:
    """Remove the base models of checkpoints in lists, which are new in 0.39."""
    if isinstance(value, list):
        return [without_base_models(item, is_checkpoint=is_checkpoint) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_base_models(item, is_checkpoint="checkpoint" in key)
        for key, item in value.items()
        if not (is_checkpoint and key == "base_model")
    }


def same_times(value: Any) -> Any:
    """Parse times, because the official CLI writes them with a space."""
    if isinstance(value, dict):
        return {key: same_times(item) for key, item in value.items()}
    if isinstance(value, list):
        return [same_times(item) for item in value]
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return value


def without(fields: dict[str, Any], added: set[str]) -> dict[str, Any]:
    assert added <= set(fields)
    return {name: value for name, value in fields.items() if name not in added}


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official command line is not installed")
def test_list_and_info_json_match_official_cli(seeded: SeededServer, tinkex: RunCli) -> None:
    for words in (
        ("run", "list"),
        ("run", "info", seeded.run_ids[1]),
        ("checkpoint", "list"),
        ("checkpoint", "list", "--run-id", seeded.run_ids[1]),
        ("checkpoint", "info", seeded.sampler),
    ):
        ours, theirs = tinkex("-f", "json", *words).json, official(*words)
        added = ADDED_TO_CHECKPOINT if words[:2] == ("checkpoint", "info") else ADDED
        if words == ("run", "list"):
            ours["runs"] = [without(run, ADDED_TO_RUN) for run in ours["runs"]]
        elif words[0] == "run":
            added = ADDED_TO_RUN
        ours = without_base_models(without(ours, added))
        assert same_times(ours) == same_times(theirs)
