"""What to do with a stage: skip it, start it, resume it, or stop because something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tinkex.pipeline.run.stage_records import StageRecord, StageStatus
from tinkex.pipeline.run.trainer_commands import describe_changes


class StageAction(StrEnum):
    """What happens to a stage in a run."""

    SKIP = "skipped"  #: it is complete, and nothing it was made from has changed
    START = "trained"  #: there is nothing to go on from
    RESUME = "resumed"  #: a step checkpoint is there
    STOP = "refused"  #: what is there was made otherwise; nobody said to throw it away


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOnDisk:
    """What is there of a stage."""

    record: StageRecord | None
    step_dir: Path | None
    """Its newest step checkpoint that is valid."""
    digest: str | None
    """Of its result, if that is there."""
    reported_digest: str | None = None
    """What its trainer said of the result that it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedInputs:
    """What a stage is to be made from."""

    config: Mapping[str, str]
    parent: str | None
    parent_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    """What to do, and why."""

    action: StageAction
    changes: tuple[str, ...] = ()


def decide(on_disk: StageOnDisk, requested: RequestedInputs) -> StageDecision:
    """The only place that decides whether work is kept, continued or refused."""
    if on_disk.step_dir is None and on_disk.digest is None:
        return StageDecision(action=StageAction.START)
    record = on_disk.record
    changes = _find_changes(record, on_disk, requested) if record is not None else ()
    if changes:
        return StageDecision(action=StageAction.STOP, changes=changes)
    is_complete = record is not None and record.status is StageStatus.COMPLETE
    # Without a result there is still its last step, from which the same result is made again.
    if is_complete and on_disk.digest is not None:
        return StageDecision(action=StageAction.SKIP)
    return StageDecision(
        action=StageAction.RESUME if on_disk.step_dir is not None else StageAction.START
    )


def _find_changes(
    record: StageRecord, on_disk: StageOnDisk, requested: RequestedInputs
) -> tuple[str, ...]:
    changes = describe_changes(record.config, requested.config)
    # One that was killed may have left a new result beside what is said of the old one.
    is_told = record.status is StageStatus.COMPLETE and on_disk.digest and on_disk.reported_digest
    if is_told and on_disk.digest != on_disk.reported_digest:
        digests = f"{_short_digest(on_disk.reported_digest)} -> {_short_digest(on_disk.digest)}"
        changes.append(f"result: its files are not those that its trainer left ({digests})")
    if record.parent_digest != requested.parent_digest:
        changes.append(_parent_change(record, requested))
    return tuple(changes)


def _parent_change(record: StageRecord, requested: RequestedInputs) -> str:
    then, now = record.parent or "nothing", requested.parent or "nothing"
    if then != now:
        return f"parent: {then} -> {now}"
    digests = f"{_short_digest(record.parent_digest)} -> {_short_digest(requested.parent_digest)}"
    return f"parent: {now} was trained again ({digests})"


def _short_digest(digest: str | None) -> str:
    return digest[:12] if digest else "(none)"
