"""What to do with a stage: skip it, start it, resume it, or stop because something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tinkex.pipeline.run.arguments import changes_between
from tinkex.pipeline.run.records import StageRecord, Status


class Action(StrEnum):
    """What happens to a stage in a run."""

    SKIP = "skipped"  #: it is complete, and nothing it was made from has changed
    START = "trained"  #: there is nothing to go on from
    RESUME = "resumed"  #: a step checkpoint is there
    STOP = "refused"  #: what is there was made otherwise; nobody said to throw it away


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is there of a stage."""

    record: StageRecord | None
    step_dir: Path | None
    """Its newest step checkpoint that is valid."""
    digest: str | None
    """Of its result, if that is there."""
    told_digest: str | None = None
    """What its trainer said of the result that it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a stage is to be made from."""

    config: Mapping[str, str]
    parent: str | None
    parent_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why."""

    action: Action
    changes: tuple[str, ...] = ()


def decide(found: Found, wanted: Wanted) -> Decision:
    """The only place that decides whether work is kept, continued or refused."""
    if found.step_dir is None and found.digest is None:
        return Decision(action=Action.START)
    record = found.record
    changes = _changes(record, found, wanted) if record is not None else ()
    if changes:
        return Decision(action=Action.STOP, changes=changes)
    is_complete = record is not None and record.status is Status.COMPLETE
    # Without a result there is still its last step, from which the same result is made again.
    if is_complete and found.digest is not None:
        return Decision(action=Action.SKIP)
    return Decision(action=Action.RESUME if found.step_dir is not None else Action.START)


def _changes(record: StageRecord, found: Found, wanted: Wanted) -> tuple[str, ...]:
    changes = changes_between(record.config, wanted.config)
    # One that was killed may have left a new result beside what is said of the old one.
    is_told = record.status is Status.COMPLETE and found.digest and found.told_digest
    if is_told and found.digest != found.told_digest:
        digests = f"{_short(found.told_digest)} -> {_short(found.digest)}"
        changes.append(f"result: its files are not those that its trainer left ({digests})")
    if record.parent_digest != wanted.parent_digest:
        changes.append(_parent_change(record, wanted))
    return tuple(changes)


def _parent_change(record: StageRecord, wanted: Wanted) -> str:
    then, now = record.parent or "nothing", wanted.parent or "nothing"
    if then != now:
        return f"parent: {then} -> {now}"
    digests = f"{_short(record.parent_digest)} -> {_short(wanted.parent_digest)}"
    return f"parent: {now} was trained again ({digests})"


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "(none)"
