"""Status and metrics of the stages in an output directory (read-only)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tinkex.errors import ConfigError
from tinkex.pipeline.checkpoints.step_directory import is_valid_step, step_number
from tinkex.pipeline.output_locks import find_holder
from tinkex.pipeline.run.stage_records import (
    MetricChange,
    StageRecord,
    StageResult,
    StageStatus,
    read_record,
    read_result,
    reported_digest,
)
from tinkex.pipeline.run.stage_specs import STAGE_ORDER, STAGES_BY_NAME, StageSpec

METRICS_NAME = "metrics.jsonl"
_TAIL_BYTES = 1 << 16


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a stage for display and JSON output."""

    stage: str
    status: str
    """running, complete, failed, interrupted, or died: its trainer ended without a record."""
    stale: str | None = None
    """Set if the parent has changed since the stage was trained."""
    step: int | None = None
    """The newest optimizer step, from the result, the step checkpoints and the metrics."""
    saved_step: int | None = None
    """The newest step checkpoint."""
    loss: float | None = None
    updated_at: datetime | None = None
    pid: int | None = None
    metrics: dict[str, MetricChange] = {}
    directory: str


def list_stage_summaries(out_dir: Path) -> list[StageSummary]:
    """Return the stages that have started, in order."""
    holder = find_holder(out_dir)
    running = holder.stage if holder is not None else None
    started = [stage for stage in STAGE_ORDER if stage.directory(out_dir).is_dir()]
    return [_summarize(stage, out_dir, stage.name == running) for stage in started]


def _summarize(stage: StageSpec, out_dir: Path, is_running: bool) -> StageSummary:
    directory = stage.directory(out_dir)
    record, result = read_record(directory), read_result(directory)
    last = _last_row(directory / METRICS_NAME)
    saved_step = _saved_step(stage.checkpoint_dir(out_dir))
    status = _status(record, is_running)
    return StageSummary(
        stage=stage.name,
        status=status,
        stale=_stale_reason(stage, record, out_dir),
        step=newest_step(
            _step(last) if last else None,
            saved_step,
            result if status == StageStatus.COMPLETE else None,
        ),
        saved_step=saved_step,
        loss=_number(last, "loss"),
        updated_at=_updated_at(directory),
        pid=record.pid if record is not None and is_running else None,
        metrics=result.metrics if result is not None else {},
        directory=str(directory),
    )


def newest_step(
    logged_step: int | None, saved_step: int | None, result: StageResult | None
) -> int | None:
    """Return the newest step of a stage; metrics are logged only every few steps."""
    if result is not None and result.steps:
        return result.steps
    return max((step for step in (logged_step, saved_step) if step is not None), default=None)


def _status(record: StageRecord | None, is_running: bool) -> str:
    if is_running:
        return StageStatus.RUNNING.value
    if record is None:
        return "unknown"
    return "died" if record.status is StageStatus.RUNNING else record.status.value


def _stale_reason(stage: StageSpec, record: StageRecord | None, out_dir: Path) -> str | None:
    if record is None or record.parent not in STAGES_BY_NAME:
        return None
    if reported_digest(STAGES_BY_NAME[record.parent], out_dir) == record.parent_digest:
        return None
    return f"{record.parent} has changed since {stage.name} was trained"


def _saved_step(root: Path) -> int | None:
    steps = [step_number(path) for path in root.glob("step_*") if is_valid_step(path)]
    return max((step for step in steps if step is not None), default=None)


def _updated_at(directory: Path) -> datetime | None:
    times = [time for path in directory.iterdir() if (time := _file_time(path)) is not None]
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _file_time(path: Path) -> float | None:
    """Return the modification time of a file; None for directories and removed files."""
    try:
        return path.stat().st_mtime if path.is_file() else None
    except FileNotFoundError:
        return None


# --- metrics ------------------------------------------------------------------------------


#: A line of metrics.jsonl: its step, and metrics by name.
MetricRow = dict[str, object]


def read_metrics(stage: str, out_dir: Path) -> list[MetricRow]:
    """Return all metrics of a stage in step order.

    Truncated lines, and lines that a resumed run logged again, are dropped.
    """
    if stage not in STAGES_BY_NAME:
        raise ConfigError(f"unknown stage {stage!r}; expected one of {', '.join(STAGES_BY_NAME)}")
    path = STAGES_BY_NAME[stage].directory(out_dir) / METRICS_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{stage} has no metrics yet: {path} does not exist",
            hint="`tinkex pipeline status` shows which stages have started.",
        ) from None
    return drop_repeated_steps(
        row for line in content.splitlines() if (row := _row(line)) is not None
    )


def drop_repeated_steps(rows: Iterable[MetricRow]) -> list[MetricRow]:
    """Drop the rows of steps that a resumed run repeated."""
    result: list[MetricRow] = []
    for row in rows:
        step = _step(row)
        last: MetricRow = result[-1] if result else {"step": -1}
        is_same = _step(last) == step and len(last.keys() & row.keys()) > 1
        # A resumed run repeats steps: drop what was logged from that step on.
        while (is_same or _step(last) > step) and result and _step(result[-1]) >= step:
            result.pop()
        result.append(row)
    return result


def _last_row(path: Path) -> MetricRow:
    """Return the last row with a loss; reads only the end of the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    rows = [row for line in lines if (row := _row(line)) is not None]
    return next((row for row in reversed(rows) if _number(row, "loss") is not None), {})


def _row(line: bytes) -> MetricRow | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _step(row: MetricRow) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _number(row: MetricRow, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
