"""Run one stage: decide what to do with it, train it and record the outcome."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tinkex import clock
from tinkex.pipeline.checkpoints.step_directory import (
    latest_step,
    recover_replaced_steps,
    step_number,
)
from tinkex.pipeline.output_locks import RunLock, lock_directory
from tinkex.pipeline.run import report, stage_records
from tinkex.pipeline.run.child import SignalForwarder, run_child
from tinkex.pipeline.run.plan import RunPlan
from tinkex.pipeline.run.report import RunOutput, StageOutcome
from tinkex.pipeline.run.stage_files import link_legacy
from tinkex.pipeline.run.stage_records import (
    StageAction,
    StageRecord,
    StageStart,
    StageStatus,
    fingerprint_result,
    reported_digest,
    resolve_start,
    result_digest,
)
from tinkex.pipeline.run.stage_specs import TOKENIZER, StageSpec
from tinkex.pipeline.run.trainer_commands import SETTINGS_NAME, describe_changes, settings_command
from tinkex.pipeline.settings_sources import to_json
from tinkex.system.atomic import remove_scratch, write_file_atomic


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
    changes = describe_changes(record.stage, record.config, requested.config)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Shared objects of all stages of a run."""

    plan: RunPlan
    output: RunOutput
    lock: RunLock
    signals: SignalForwarder


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInspection:
    """State of a stage, and what to do with it."""

    stage: StageSpec
    start: StageStart
    on_disk: StageOnDisk
    record: StageRecord
    """The record to write; its command resumes if there is a checkpoint."""
    decision: StageDecision


def inspect_stage(stage: StageSpec, plan: RunPlan) -> StageInspection:
    """Compare a stage on disk with what this run would produce."""
    directory = stage.directory(plan.config.out_dir)
    start = resolve_start(stage, plan.config, skip_pretrain=plan.skips_pretrain)
    data = plan.fingerprint_data(stage)
    config = plan.result_config(stage, start, data)
    if directory.is_dir():
        # A trainer that was started separately may be using the directory.
        with lock_directory(directory):
            remove_scratch(directory)
            recover_replaced_steps(stage.checkpoint_dir(plan.config.out_dir))
    on_disk = StageOnDisk(
        record=stage_records.read_record(directory),
        step_dir=latest_step(stage.checkpoint_dir(plan.config.out_dir)),
        digest=result_digest(fingerprint_result(stage, plan.config.out_dir)),
        reported_digest=reported_digest(stage, plan.config.out_dir),
    )
    requested = RequestedInputs(config=config, parent=start.parent, parent_digest=start.digest)
    record = StageRecord(
        stage=stage.name,
        status=StageStatus.RUNNING,
        config=config,
        config_hash=stage_records.hash_config(config),
        parent=start.parent,
        parent_digest=start.digest,
        data=data,
        command=plan.command(stage, start, on_disk.step_dir),
        started_at=_now(),
    )
    decision = decide(on_disk, requested)
    return StageInspection(
        stage=stage, start=start, on_disk=on_disk, record=record, decision=decision
    )


def run_stage(stage: StageSpec, context: StageContext) -> StageOutcome:
    """Complete one stage; raises RunStopped if that fails."""
    inspection = inspect_stage(stage, context.plan)
    action = inspection.decision.action
    if action is StageAction.STOP:
        out_dir = str(context.plan.config.out_dir)
        raise report.inputs_changed(stage.name, out_dir, inspection.decision.changes)
    if action is StageAction.SKIP:
        _report_skipped(inspection, context)
    else:
        _train(inspection, context)
    for link in link_legacy(stage, context.plan.config.out_dir):
        if action is not StageAction.SKIP:
            context.output.write_line(f"weights: {link}", stage.name)
    result = None
    if stage is not TOKENIZER:
        result = stage_records.read_result(stage.directory(context.plan.config.out_dir))
    return StageOutcome(stage=stage.name, action=action, result=result)


def _report_skipped(inspection: StageInspection, context: StageContext) -> None:
    result = stage_records.read_result(inspection.stage.directory(context.plan.config.out_dir))
    details = f" at step {result.steps} after {result.seconds:.1f} s" if result is not None else ""
    context.output.write_line(f"complete{details}: nothing to do", inspection.stage.name)
    if inspection.on_disk.step_dir is not None:
        context.output.write_line(
            f"to resume it: {shlex.join(inspection.record.command)}", inspection.stage.name
        )


def _train(inspection: StageInspection, context: StageContext) -> None:
    stage, directory = inspection.stage, inspection.stage.directory(context.plan.config.out_dir)
    step_dir = inspection.on_disk.step_dir
    action = f"resumes from {step_dir}" if step_dir is not None else "starts"
    origin = f", from {inspection.start.parent}" if inspection.start.parent else ""
    context.output.write_line(f"{action}{origin}", stage.name)
    context.output.write_line(f"$ {shlex.join(inspection.record.command)}", stage.name)
    directory.mkdir(parents=True, exist_ok=True)
    stage_records.write_record(directory, inspection.record)
    code = run_child(
        _prepare_command(inspection, context.plan),
        context.signals,
        context.lock,
        context.output,
        stage=stage.name,
        on_start=lambda pid: stage_records.write_record(
            directory, replace(inspection.record, pid=pid)
        ),
    )
    _record_result(inspection, context, code)


def _prepare_command(inspection: StageInspection, plan: RunPlan) -> list[str]:
    """Return the command to run; our own trainers read settings.json instead of the flags."""
    stage = inspection.stage
    if stage is TOKENIZER or plan.config.trainer_dir is not None:
        return inspection.record.command
    settings = plan.settings(stage, inspection.start, inspection.on_disk.step_dir)
    path = stage.directory(plan.config.out_dir) / SETTINGS_NAME
    write_file_atomic(path, to_json(stage.name, settings).encode(), mode=0o644)
    return settings_command(stage, plan.config)


def _record_result(inspection: StageInspection, context: StageContext, code: int) -> None:
    """Record how a trainer ended; raises RunStopped unless the stage is complete."""
    stage, out_dir = inspection.stage, context.plan.config.out_dir
    files = fingerprint_result(stage, out_dir) if code == 0 else []
    digest = result_digest(files)
    stop_code = context.signals.exit_code or (code if code in {130, 143} else None)
    if digest is not None:
        status = StageStatus.COMPLETE
    else:
        status = StageStatus.FAILED if stop_code is None else StageStatus.INTERRUPTED
    finished = replace(
        inspection.record,
        status=status,
        finished_at=_now(),
        exit_code=code,
        result=files,
        digest=digest,
    )
    stage_records.write_record(stage.directory(out_dir), finished)
    step = _step(latest_step(stage.checkpoint_dir(out_dir)))
    if stop_code is not None:
        raise report.stage_interrupted(stage.name, step, stop_code)
    if code:
        raise report.stage_failed(stage.name, step, code, context.output.location_hint)
    if digest is None:
        raise report.missing_result(stage.name)


def _step(path: Path | None) -> int | None:
    return None if path is None else step_number(path)


def _now() -> str:
    return clock.utc_now().isoformat(timespec="seconds")
