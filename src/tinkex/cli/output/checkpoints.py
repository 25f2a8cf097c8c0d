"""Checkpoints as they are printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex.cli.format import format_bool, format_optional, format_size, format_timestamp
from tinkex.cli.output.base import Column, Output, PropertiesOutput, list_title
from tinkex.cli.output.runs import metadata_rows
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from tinkex.cli.paging import Listing
    from tinkex.types import Checkpoint, TrainingRun


class CheckpointColumn(NamedTuple):
    """A column that a list of checkpoints can show."""

    column: Column
    cell: Callable[[Checkpoint], str]
    summary: str


CHECKPOINT_COLUMNS = {
    "id": CheckpointColumn(
        Column("Checkpoint ID", 4), lambda saved: saved.checkpoint_id, "id within its run"
    ),
    "type": CheckpointColumn(
        Column("Type", 3), lambda saved: saved.checkpoint_type, "training, sampler or external"
    ),
    "size": CheckpointColumn(
        Column("Size", 2, is_number=True),
        lambda saved: format_size(saved.size_bytes),
        "size of its files",
    ),
    "public": CheckpointColumn(
        Column("Public", 6), lambda saved: format_bool(saved.public), "whether all may read it"
    ),
    "created": CheckpointColumn(
        Column("Created", 1), lambda saved: format_timestamp(saved.time), "when it was made"
    ),
    "expires": CheckpointColumn(
        Column("Expires", 5), lambda saved: _format_expiry(saved), "when it is deleted"
    ),
    "path": CheckpointColumn(Column("Path"), lambda saved: saved.tinker_path, "its address"),
    "run": CheckpointColumn(
        Column("Run ID", 4), lambda saved: _get_run_id(saved), "the run it belongs to"
    ),
}
DEFAULT_CHECKPOINT_COLUMNS = ("id", "type", "size", "public", "created", "expires", "path")


def _format_expiry(saved: Checkpoint) -> str:
    return format_timestamp(saved.expires_at) if saved.expires_at else "Never"


def _get_run_id(saved: Checkpoint) -> str:
    return parse_tinker_path(saved.tinker_path).run_id


class CheckpointList(Output):
    """A list of checkpoints."""

    def __init__(
        self,
        checkpoints: Listing[Checkpoint],
        run_id: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Columns that were asked for by name are all shown, however narrow the screen."""
        self._checkpoints = checkpoints
        self._run_id = run_id
        self._names = tuple(columns or DEFAULT_CHECKPOINT_COLUMNS)
        self._is_chosen = columns is not None

    def to_dict(self) -> dict[str, Any]:
        """The official shape, and how many there are."""
        shown = [saved.model_dump() for saved in self._checkpoints.items]
        about = {"run_id": self._run_id} if self._run_id else {}
        counts = {"total": self._checkpoints.total, "shown": len(shown)}
        return about | {"checkpoints": shown} | counts

    def columns(self) -> Sequence[Column]:
        """The chosen columns."""
        chosen = [CHECKPOINT_COLUMNS[name].column for name in self._names]
        return [column._replace(rank=0) for column in chosen] if self._is_chosen else chosen

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per checkpoint."""
        return [
            [CHECKPOINT_COLUMNS[name].cell(saved) for name in self._names]
            for saved in self._checkpoints.items
        ]

    def title(self) -> str:
        """How many there are, and of which run."""
        about = f" for run {self._run_id}" if self._run_id else ""
        found = self._checkpoints
        return list_title(len(found.items), found.num_hidden, "checkpoint", about)


class CheckpointInfo(PropertiesOutput):
    """One checkpoint, and what its run says about it."""

    def __init__(self, saved: Checkpoint, run: TrainingRun) -> None:
        lora = f"Yes (Rank {run.lora_rank})" if run.is_lora and run.lora_rank else None
        rows = [
            ("Checkpoint ID", saved.checkpoint_id),
            ("Type", saved.checkpoint_type),
            ("Tinker Path", saved.tinker_path),
            ("Size", format_optional(saved.size_bytes, format_size)),
            ("Public", format_bool(saved.public)),
            ("Created", format_timestamp(saved.time)),
            ("Expires", _format_expiry(saved)),
            ("Training Run ID", run.training_run_id),
            ("Base Model", run.base_model),
            ("LoRA", lora or format_bool(run.is_lora)),
            *metadata_rows(saved.user_metadata),
        ]
        data = saved.model_dump() | {"is_lora": run.is_lora, "lora_rank": run.lora_rank}
        more = {"training_run_id": run.training_run_id, "base_model": run.base_model}
        super().__init__(data | more, rows, f"Checkpoint: {saved.checkpoint_id}")
