"""Checkpoint filters, and the text of the confirmation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinkex.cli.commands.checkpoint.list import (
    CHECKPOINT_TYPES,
    MAX_LISTED,
    CheckpointFilter,
    SelectedCheckpoint,
    describe_selection,
    format_total_size,
)
from tinkex.types import Checkpoint

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def saved(**facts: Any) -> Checkpoint:
    """A checkpoint."""
    name = facts.pop("name", "0001")
    defaults: dict[str, Any] = {
        "checkpoint_id": f"weights/{name}",
        "checkpoint_type": "training",
        "time": NOON,
        "tinker_path": f"tinker://r/weights/{name}",
    }
    return Checkpoint(**defaults | facts)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (CheckpointFilter(), True),
        (CheckpointFilter(run_id="r"), True),
        (CheckpointFilter(checkpoint_type="training"), True),
        (CheckpointFilter(checkpoint_type="sampler"), False),
        (CheckpointFilter(before=NOON), False),
        (CheckpointFilter(before=NOON + timedelta(seconds=1)), True),
        (CheckpointFilter(after=NOON), False),
        (CheckpointFilter(after=NOON - timedelta(seconds=1)), True),
        (CheckpointFilter(after=NOON - timedelta(days=1), before=NOON - timedelta(hours=1)), False),
        (CheckpointFilter(checkpoint_type="training", before=NOON), False),
    ],
)
def test_filter_combines_conditions(wanted: CheckpointFilter, fits: bool) -> None:
    assert wanted.matches(saved()) is fits
    assert wanted.matches(saved(time=NOON.replace(tzinfo=None))) is fits


def test_each_type_has_two_names() -> None:
    assert (CHECKPOINT_TYPES["weights"], CHECKPOINT_TYPES["training"]) == ("training", "training")
    assert (CHECKPOINT_TYPES["sampler_weights"], CHECKPOINT_TYPES["sampler"]) == (
        "sampler",
        "sampler",
    )
    assert (CHECKPOINT_TYPES["external_weights"], CHECKPOINT_TYPES["external"]) == (
        "external",
        "external",
    )


def test_filter_is_empty_without_conditions() -> None:
    assert CheckpointFilter().is_empty
    assert not CheckpointFilter(run_id="r").is_empty
    assert not CheckpointFilter(after=NOON).is_empty


def test_confirmation_lists_paths_sizes_and_warning() -> None:
    chosen = [
        SelectedCheckpoint("tinker://r/weights/0001", saved(size_bytes=1024)),
        SelectedCheckpoint("tinker://r/weights/0002", saved(size_bytes=512, public=True)),
    ]
    shown = describe_selection(chosen).splitlines()
    assert shown[0] == "2 checkpoints (1.5 kB):"
    assert shown[1:3] == ["  tinker://r/weights/0001", "    training, 1.0 kB, 2026-01-31"]
    assert shown[4].endswith("512 B, 2026-01-31, public")
    assert shown[5] == "This cannot be undone."


def test_unknown_sizes_are_described() -> None:
    assert format_total_size([SelectedCheckpoint("a")]) == "size unknown"
    assert (
        format_total_size([SelectedCheckpoint("a"), SelectedCheckpoint("b", saved(size_bytes=1))])
        == "at least 1 B"
    )
    assert "tinker://r/weights/9\n    not found" in describe_selection(
        [SelectedCheckpoint("tinker://r/weights/9")]
    )
    assert "    training, 2026-01-31\n" in describe_selection([SelectedCheckpoint("x", saved())])


def test_long_selection_is_counted() -> None:
    shown = describe_selection(
        [SelectedCheckpoint(f"tinker://r/weights/{n}", saved()) for n in range(MAX_LISTED + 1234)]
    )
    assert len(shown.splitlines()) == 2 * MAX_LISTED + 3
    assert "  and 1,234 more" in shown


def test_paths_are_escaped() -> None:
    assert "\x1b" not in describe_selection(
        [SelectedCheckpoint("tinker://\x1b[2J", saved()), SelectedCheckpoint("\x1b]8;;")]
    )
