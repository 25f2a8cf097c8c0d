"""Training runs as they are printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex.cli.format import format_bool, format_timestamp
from tinkex.cli.output.base import Column, Facts, Output, list_title

if TYPE_CHECKING:
    from tinkex.cli.paging import Listing
    from tinkex.types import Checkpoint, TrainingRun


class RunColumn(NamedTuple):
    """A column that a list of runs can show."""

    column: Column
    cell: Callable[[TrainingRun], str]
    summary: str


RUN_COLUMNS = {
    "id": RunColumn(Column("Run ID"), lambda run: run.training_run_id, "id of the run"),
    "model": RunColumn(Column("Base Model"), lambda run: run.base_model, "base model"),
    "owner": RunColumn(Column("Owner", 5), lambda run: run.model_owner, "who made it"),
    "lora": RunColumn(Column("LoRA", 4), lambda run: _lora(run), "rank of the adapter"),
    "updated": RunColumn(
        Column("Last Update", 2), lambda run: format_timestamp(run.last_request_time), "last use"
    ),
    "status": RunColumn(Column("Status", 3), lambda run: status_of(run), "OK or Failed"),
    "checkpoint": RunColumn(
        Column("Last Checkpoint", 4),
        lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else "None",
        "newest training checkpoint",
    ),
    "checkpoint_time": RunColumn(
        Column("Checkpoint Time", 5),
        lambda run: format_timestamp(run.last_checkpoint.time if run.last_checkpoint else None),
        "when that was made",
    ),
}
DEFAULT_RUN_COLUMNS = ("id", "model", "lora", "updated", "status")


def status_of(run: TrainingRun) -> str:
    """A run's status in one word."""
    return "Failed" if run.corrupted else "OK"


def _lora(run: TrainingRun) -> str:
    if run.is_lora and run.lora_rank:
        return f"Rank {run.lora_rank}"
    return format_bool(run.is_lora)


class RunList(Output):
    """A list of training runs."""

    def __init__(self, runs: Listing[TrainingRun], columns: Sequence[str] | None = None) -> None:
        """Columns that were asked for by name are all shown, however narrow the screen."""
        self._runs = runs
        self._names = tuple(columns or DEFAULT_RUN_COLUMNS)
        self._is_chosen = columns is not None

    def to_dict(self) -> dict[str, Any]:
        """The official shape, and how many there are."""
        runs = [run.model_dump() for run in self._runs.items]
        return {"runs": runs, "total": self._runs.total, "shown": len(runs)}

    def columns(self) -> Sequence[Column]:
        """The chosen columns."""
        chosen = [RUN_COLUMNS[name].column for name in self._names]
        return [column._replace(rank=0) for column in chosen] if self._is_chosen else chosen

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per run."""
        return [[RUN_COLUMNS[name].cell(run) for name in self._names] for run in self._runs.items]

    def title(self) -> str:
        """How many there are."""
        return list_title(len(self._runs.items), self._runs.num_hidden, "training run")


class RunInfo(Facts):
    """One training run."""

    def __init__(self, run: TrainingRun) -> None:
        lora = f"Yes (Rank {run.lora_rank})" if run.is_lora and run.lora_rank else None
        rows = [
            ("Run ID", run.training_run_id),
            ("Base Model", run.base_model),
            ("Owner", run.model_owner),
            ("LoRA", lora or format_bool(run.is_lora)),
            ("Last Update", format_timestamp(run.last_request_time)),
            ("Status", status_of(run)),
            *_checkpoint_rows("Last Training Checkpoint", run.last_checkpoint),
            *_checkpoint_rows("Last Sampler Checkpoint", run.last_sampler_checkpoint),
            *metadata_rows(run.user_metadata),
        ]
        super().__init__(run.model_dump(), rows, f"Training Run: {run.training_run_id}")


def _checkpoint_rows(label: str, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    if checkpoint is None:
        return []
    return [
        (label, checkpoint.checkpoint_id),
        ("  - Time", format_timestamp(checkpoint.time)),
        ("  - Path", checkpoint.tinker_path),
    ]


def metadata_rows(metadata: dict[str, str] | None) -> list[tuple[str, str]]:
    """What the owner attached, a row per entry."""
    if not metadata:
        return []
    return [("Metadata", ""), *((f"  - {key}", value) for key, value in metadata.items())]
