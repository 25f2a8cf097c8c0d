"""Output of training runs and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tinkex.cli.context import Format, Screen
from tinkex.cli.format import format_bool, format_optional, format_timestamp, truncate_cells
from tinkex.cli.output.base import Column, Output, PropertiesOutput, list_title
from tinkex.display import format_metric, metric_label, select_headlines

if TYPE_CHECKING:
    from tinkex.cli.client import Listing
    from tinkex.types import Checkpoint, SupportedModel, TrainingRun


class RunColumn(NamedTuple):
    """A column that a list of runs can show."""

    column: Column
    cell: Callable[[TrainingRun], str]
    summary: str


RUN_COLUMNS = {
    "id": RunColumn(Column("Run ID"), lambda run: run.training_run_id, "id of the run"),
    "name": RunColumn(Column("Name", 2), lambda run: run.name or "", "name of the run"),
    "status": RunColumn(
        Column("Status", 1),
        lambda run: format_run_status(run),
        "training, waiting, idle, finished, interrupted or failed",
    ),
    "step": RunColumn(
        Column("Step", 2, is_number=True),
        lambda run: format_optional(run.step, "{:,}".format),
        "optimizer steps",
    ),
    "metrics": RunColumn(
        Column("Metrics", 2), lambda run: format_metrics(run.metrics), "metrics of the newest step"
    ),
    "model": RunColumn(Column("Base Model", 5), lambda run: run.base_model, "base model"),
    "owner": RunColumn(Column("Owner", 6), lambda run: run.model_owner, "owner of the run"),
    "lora": RunColumn(Column("LoRA", 7), lambda run: _format_lora(run), "rank of the adapter"),
    "updated": RunColumn(
        Column("Last Update", 3),
        lambda run: format_timestamp(run.last_request_time),
        "time of the last request",
    ),
    "checkpoint": RunColumn(
        Column("Last Checkpoint", 4),
        lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else "None",
        "newest training checkpoint",
    ),
    "checkpoint_time": RunColumn(
        Column("Checkpoint Time", 5),
        lambda run: format_timestamp(run.last_checkpoint.time if run.last_checkpoint else None),
        "creation time of that checkpoint",
    ),
}
DEFAULT_RUN_COLUMNS = ("id", "name", "status", "step", "metrics", "updated", "model")
#: For servers that do not report the state of a run.
OFFICIAL_RUN_COLUMNS = ("id", "model", "lora", "updated", "status")
#: From this width on, full ids are shown.
_WIDE_TERMINAL = 140
_SHORT_SESSION = 8
#: Maximum width of names on a very narrow, a narrow and a wide terminal.
_MIN_NAME_CELLS, _NAME_CELLS, _WIDE_NAME_CELLS = 8, 20, 40
#: Width of a short id, a status and the borders.
_OTHER_COLUMNS_CELLS = 37
#: Fields that only tinkex servers report; omitted from JSON if unknown.
_OWN_FIELDS = ("name", "state", "step", "metrics", "created_at")


def format_run_status(run: TrainingRun) -> str:
    """Format a run's status; OK if the server does not report its state."""
    if run.state is not None:
        return run.state.capitalize()
    return "Failed" if run.corrupted else "OK"


def shorten_run_id(run_id: str) -> str:
    """Shorten the session part of a run id; commands accept the short form."""
    session, colon, rest = run_id.partition(":")
    return f"{session[:_SHORT_SESSION]}{colon}{rest}"


def format_metrics(metrics: Mapping[str, float] | None) -> str:
    """Format the headline metrics in one line."""
    shown = select_headlines(metrics or {})
    return ", ".join(f"{name} {format_metric(value)}" for name, value in shown.items())


def run_to_dict(run: TrainingRun) -> dict[str, object]:
    """Return the official JSON fields, plus those of tinkex servers."""
    fields = run.model_dump()
    return {key: fields[key] for key in fields if key not in _OWN_FIELDS or fields[key] is not None}


def default_run_columns(runs: Sequence[TrainingRun]) -> tuple[str, ...]:
    """Return the default columns that have values for these runs."""
    if not any(run.state is not None for run in runs):
        return OFFICIAL_RUN_COLUMNS
    is_named = any(run.name for run in runs)
    return tuple(name for name in DEFAULT_RUN_COLUMNS if is_named or name != "name")


def _format_lora(run: TrainingRun) -> str:
    if run.is_lora and run.lora_rank:
        return f"Rank {run.lora_rank}"
    return format_bool(run.is_lora)


class RunList(Output):
    """A list of training runs."""

    def __init__(self, runs: Listing[TrainingRun], columns: Sequence[str] | None = None) -> None:
        """Columns chosen by name are always shown, even on a narrow screen."""
        self._runs = runs
        self._names = tuple(columns or default_run_columns(runs.items))
        self._is_chosen = columns is not None
        self._has_short_ids = False
        self._name_cells: int | None = None

    def to_dict(self) -> dict[str, object]:
        """The official JSON fields, plus the counts."""
        runs = [run_to_dict(run) for run in self._runs.items]
        return {"runs": runs, "total": self._runs.total, "shown": len(runs)}

    def columns(self) -> Sequence[Column]:
        """The chosen columns."""
        chosen = [RUN_COLUMNS[name].column for name in self._names]
        return [column._replace(rank=0) for column in chosen] if self._is_chosen else chosen

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per run."""
        return [[self._cell(run, name) for name in self._names] for run in self._runs.items]

    def _cell(self, run: TrainingRun, column: str) -> str:
        text = RUN_COLUMNS[column].cell(run)
        if column == "id" and self._has_short_ids:
            return shorten_run_id(text)
        if column == "name" and self._name_cells is not None:
            return truncate_cells(text, self._name_cells)
        return text

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Print the list; shorten ids and names on a narrow terminal."""
        is_terminal = screen is not None and screen.is_terminal and not self._is_chosen
        width = (screen.width if screen is not None else None) or 0
        self._has_short_ids = is_terminal and width < _WIDE_TERMINAL
        left = max(_MIN_NAME_CELLS, min(width - _OTHER_COLUMNS_CELLS, _NAME_CELLS))
        most = left if self._has_short_ids else _WIDE_NAME_CELLS
        self._name_cells = most if is_terminal else None
        super().print(format, screen)

    def title(self) -> str:
        """The number of items."""
        return list_title(len(self._runs.items), self._runs.num_hidden, "training run")


class RunInfo(PropertiesOutput):
    """One training run."""

    def __init__(self, run: TrainingRun) -> None:
        lora = f"Yes (Rank {run.lora_rank})" if run.is_lora and run.lora_rank else None
        rows = [
            ("Run ID", run.training_run_id),
            *([("Name", run.name)] if run.name else []),
            ("Status", format_run_status(run)),
            *([("Step", f"{run.step:,}")] if run.step is not None else []),
            *_metric_rows(run),
            ("Base Model", run.base_model),
            ("Owner", run.model_owner),
            ("LoRA", lora or format_bool(run.is_lora)),
            *([("Created", format_timestamp(run.created_at))] if run.created_at else []),
            ("Last Update", format_timestamp(run.last_request_time)),
            *_checkpoint_rows("Last Training Checkpoint", run.last_checkpoint),
            *_checkpoint_rows("Last Sampler Checkpoint", run.last_sampler_checkpoint),
            *metadata_rows(_unnamed_metadata(run)),
        ]
        super().__init__(run_to_dict(run), rows, f"Training Run: {run.training_run_id}")


def _metric_rows(run: TrainingRun) -> list[tuple[str, str]]:
    shown = select_headlines(run.metrics or {})
    return [(metric_label(name), format_metric(value)) for name, value in shown.items()]


def _unnamed_metadata(run: TrainingRun) -> dict[str, str]:
    """Return the user metadata without the name, which has its own row."""
    attached = (run.user_metadata or {}).items()
    return {key: value for key, value in attached if (key, value) != ("name", run.name)}


def _checkpoint_rows(label: str, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    if checkpoint is None:
        return []
    return [
        (label, checkpoint.checkpoint_id),
        ("  - Time", format_timestamp(checkpoint.time)),
        ("  - Path", checkpoint.tinker_path),
    ]


def metadata_rows(metadata: Mapping[str, object] | None) -> list[tuple[str, str]]:
    """Format user metadata, a row per entry."""
    if not metadata:
        return []
    return [("Metadata", ""), *((f"  - {key}", str(value)) for key, value in metadata.items())]


class ModelList(Output):
    """The base models that a server offers."""

    def __init__(self, models: Sequence[SupportedModel], total: int) -> None:
        self._models = models
        self._total = total

    def to_dict(self) -> dict[str, object]:
        """The official JSON fields, plus the counts."""
        models = [model.model_dump() for model in self._models]
        return {"models": models, "total": self._total, "shown": len(models)}

    def columns(self) -> Sequence[Column]:
        """Name, context length and supported uses."""
        names = (Column("Model"), Column("Max Context", 1, is_number=True))
        return (*names, Column("Trainable", 2), Column("Sampleable", 2))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per model."""
        return [
            [
                format_optional(model.model_name),
                format_optional(model.max_context_length, lambda count: f"{count:,}"),
                format_optional(model.trainable, format_bool),
                format_optional(model.sampleable, format_bool),
            ]
            for model in self._models
        ]

    def title(self) -> str:
        """The number of items."""
        return list_title(len(self._models), 0, "model")
