"""Run one stage: inspect it, decide what to do, train it and record the outcome."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tinkex import clock
from tinkex.pipeline.checkpoints.step_directory import (
    latest_step,
    recover_replaced_steps,
    step_number,
)
from tinkex.pipeline.run import run_errors, stage_records
from tinkex.pipeline.run.child import SignalForwarder, run_child
from tinkex.pipeline.run.lock import RunLock
from tinkex.pipeline.run.plan import RunPlan
from tinkex.pipeline.run.report import StageOutcome
from tinkex.pipeline.run.run_output import RunOutput
from tinkex.pipeline.run.stage_decision import (
    RequestedInputs,
    StageAction,
    StageDecision,
    StageOnDisk,
    decide,
)
from tinkex.pipeline.run.stage_files import link_legacy
from tinkex.pipeline.run.stage_records import (
    StageRecord,
    StageStart,
    StageStatus,
    fingerprint_result,
    reported_digest,
    resolve_start,
    result_digest,
)
from tinkex.pipeline.run.stage_specs import TOKENIZER, StageSpec
from tinkex.pipeline.trainer_lock import lock_directory
from tinkex.system.atomic import remove_scratch


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
        raise run_errors.inputs_changed(stage.name, out_dir, inspection.decision.changes)
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
        inspection.record.command,
        context.signals,
        context.lock,
        context.output,
        stage=stage.name,
        on_start=lambda pid: stage_records.write_record(
            directory, replace(inspection.record, pid=pid)
        ),
    )
    _record_result(inspection, context, code)


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
        raise run_errors.stage_interrupted(stage.name, step, stop_code)
    if code:
        raise run_errors.stage_failed(stage.name, step, code, context.output.location_hint)
    if digest is None:
        raise run_errors.missing_result(stage.name)


def _step(path: Path | None) -> int | None:
    return None if path is None else step_number(path)


def _now() -> str:
    return clock.utc_now().isoformat(timespec="seconds")
