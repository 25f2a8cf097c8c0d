"""The stages of an output directory as they are now; reads, and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tinkex.errors import ConfigError
from tinkex.pipeline.checkpoints.step_directory import is_valid_step, step_number
from tinkex.pipeline.run.lock import find_holder
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
    """One stage, as people and programs are told about it."""

    stage: str
    status: str
    """running, complete, failed, interrupted; died: nobody trains it, and nobody said why."""
    stale: str | None = None
    """Why its parent is no more what it was made from."""
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
    """Every stage that has begun, in their order."""
    holder = find_holder(out_dir)
    running = holder.stage if holder is not None else None
    begun = [stage for stage in STAGE_ORDER if stage.directory(out_dir).is_dir()]
    return [_summarize(stage, out_dir, stage.name == running) for stage in begun]


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
            _step(last), saved_step, result if status == StageStatus.COMPLETE else None
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
    """The newest optimizer step of a stage; metrics are logged only every few steps."""
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
    return f"{record.parent} is no more what {stage.name} was made from"


def _saved_step(root: Path) -> int | None:
    # Not by the function that trainers use: it tidies up, which a mere look must not.
    steps = [step_number(path) for path in root.glob("step_*") if is_valid_step(path)]
    return max((step for step in steps if step is not None), default=None)


def _updated_at(directory: Path) -> datetime | None:
    times = [time for path in directory.iterdir() if (time := _file_time(path)) is not None]
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _file_time(path: Path) -> float | None:
    """When a file was written last; None for others, and for one that is gone by now."""
    try:
        return path.stat().st_mtime if path.is_file() else None
    except FileNotFoundError:
        return None


# --- metrics ------------------------------------------------------------------------------


def read_metrics(stage: str, out_dir: Path) -> list[dict[str, Any]]:
    """Every line of a stage's metrics, in the order of its steps.

    A line that a crash cut off is left out, and so are lines that a resumed run logged again.
    """
    if stage not in STAGES_BY_NAME:
        raise ConfigError(f"there is no stage {stage!r}; there is: {', '.join(STAGES_BY_NAME)}")
    path = STAGES_BY_NAME[stage].directory(out_dir) / METRICS_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{stage} has no metrics yet: there is no {path}",
            hint="`tinkex pipeline status` shows which stages have begun.",
        ) from None
    return drop_repeated_steps(
        row for line in content.splitlines() if (row := _row(line)) is not None
    )


def drop_repeated_steps(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those of steps that a resumed run trained again."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        last = kept[-1] if kept else {"step": -1}
        is_same = last["step"] == row["step"] and len(last.keys() & row.keys()) > 1
        # A resumed run goes back: what was logged from that step on no longer holds.
        while (is_same or last["step"] > row["step"]) and kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def _last_row(path: Path) -> dict[str, Any]:
    """The last line that tells a loss, read from the end: the file may be long."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    rows = [row for line in lines if (row := _row(line)) is not None]
    return next((row for row in reversed(rows) if _number(row, "loss") is not None), {})


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and _step(row) is not None else None


def _step(row: dict[str, Any]) -> int | None:
    step = row.get("step")
    return step if isinstance(step, int) else None


def _number(row: dict[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
