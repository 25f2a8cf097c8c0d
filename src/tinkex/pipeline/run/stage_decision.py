"""Decide what to do with a stage: skip, start, resume, or stop because its inputs changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tinkex.pipeline.run.stage_records import StageRecord, StageStatus
from tinkex.pipeline.run.trainer_commands import describe_changes


class StageAction(StrEnum):
    """Action for a stage in a run."""

    SKIP = "skipped"  #: complete, with unchanged inputs
    START = "trained"  #: no checkpoint to resume from
    RESUME = "resumed"  #: a step checkpoint exists
    STOP = "refused"  #: the inputs changed, and no restart was requested


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOnDisk:
    """State of a stage on disk."""

    record: StageRecord | None
    step_dir: Path | None
    """The newest valid step checkpoint."""
    digest: str | None
    """Digest of the result, if it exists."""
    reported_digest: str | None = None
    """Digest of the result according to its trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedInputs:
    """Inputs of a stage as this run requests them."""

    config: Mapping[str, str]
    parent: str | None
    parent_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    """The action, and the changes that led to it."""

    action: StageAction
    changes: tuple[str, ...] = ()


def decide(on_disk: StageOnDisk, requested: RequestedInputs) -> StageDecision:
    """Decide whether a stage is skipped, started, resumed or refused."""
    if on_disk.step_dir is None and on_disk.digest is None:
        return StageDecision(action=StageAction.START)
    record = on_disk.record
    changes = _find_changes(record, on_disk, requested) if record is not None else ()
    if changes:
        return StageDecision(action=StageAction.STOP, changes=changes)
    is_complete = record is not None and record.status is StageStatus.COMPLETE
    # Without the result, the last step reproduces it.
    if is_complete and on_disk.digest is not None:
        return StageDecision(action=StageAction.SKIP)
    return StageDecision(
        action=StageAction.RESUME if on_disk.step_dir is not None else StageAction.START
    )


def _find_changes(
    record: StageRecord, on_disk: StageOnDisk, requested: RequestedInputs
) -> tuple[str, ...]:
    changes = describe_changes(record.config, requested.config)
    # A killed trainer may have left a new result beside the result.json of an older one.
    has_digests = (
        record.status is StageStatus.COMPLETE and on_disk.digest and on_disk.reported_digest
    )
    if has_digests and on_disk.digest != on_disk.reported_digest:
        digests = f"{_short_digest(on_disk.reported_digest)} -> {_short_digest(on_disk.digest)}"
        changes.append(f"result: the files differ from those that the trainer wrote ({digests})")
    if record.parent_digest != requested.parent_digest:
        changes.append(_parent_change(record, requested))
    return tuple(changes)


def _parent_change(record: StageRecord, requested: RequestedInputs) -> str:
    then, now = record.parent or "nothing", requested.parent or "nothing"
    if then != now:
        return f"parent: {then} -> {now}"
    digests = f"{_short_digest(record.parent_digest)} -> {_short_digest(requested.parent_digest)}"
    return f"parent: {now} was retrained ({digests})"


def _short_digest(digest: str | None) -> str:
    return digest[:12] if digest else "(none)"
