"""One stage of a run: look at what is there, decide, train it, and write down how it ended."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tinkex import clock
from tinkex.checkpoint.atomic import remove_scratch
from tinkex.pipeline.holding import hold
from tinkex.pipeline.run import ended, records
from tinkex.pipeline.run.child import Signals, run_child
from tinkex.pipeline.run.decisions import Action, Decision, Found, Wanted, decide
from tinkex.pipeline.run.links import link_legacy
from tinkex.pipeline.run.lock import RunLock
from tinkex.pipeline.run.plan import RunPlan
from tinkex.pipeline.run.records import StageRecord, Status
from tinkex.pipeline.run.report import Outcome
from tinkex.pipeline.run.say import Voice
from tinkex.pipeline.run.stages import TOKENIZER, Stage
from tinkex.pipeline.run.starts import Start, describe_result, result_digest, start_of, told_digest
from tinkex.pipeline.steps import latest_step, recover, step_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all stages of a run share."""

    plan: RunPlan
    voice: Voice
    lock: RunLock
    signals: Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A stage as it is and as it is wanted."""

    stage: Stage
    start: Start
    found: Found
    record: StageRecord
    """What will be written about it; its command resumes if there is anything to resume."""
    decision: Decision


def look_at(stage: Stage, plan: RunPlan) -> Look:
    """Compare what is on disk with what the run would make."""
    directory = stage.directory(plan.config.out_dir)
    start = start_of(stage, plan.config, skip_pretrain=plan.skips_pretrain)
    data = plan.describe_data(stage)
    recipe = plan.recipe(stage, start, data)
    if directory.is_dir():
        # Not under the hands of a trainer that somebody started by itself.
        with hold(directory):
            remove_scratch(directory)
            recover(stage.checkpoint_dir(plan.config.out_dir))
    found = Found(
        record=records.read_record(directory),
        step_dir=latest_step(stage.checkpoint_dir(plan.config.out_dir)),
        digest=result_digest(describe_result(stage, plan.config.out_dir)),
        told_digest=told_digest(stage, plan.config.out_dir),
    )
    wanted = Wanted(config=recipe, parent=start.parent, parent_digest=start.digest)
    record = StageRecord(
        stage=stage.name,
        status=Status.RUNNING,
        config=recipe,
        config_hash=records.hash_config(recipe),
        parent=start.parent,
        parent_digest=start.digest,
        data=data,
        command=plan.command(stage, start, found.step_dir),
        started_at=_now(),
    )
    decision = decide(found, wanted)
    return Look(stage=stage, start=start, found=found, record=record, decision=decision)


def run_stage(stage: Stage, around: Surroundings) -> Outcome:
    """Bring one stage to its end, or raise RunEnded."""
    look = look_at(stage, around.plan)
    action = look.decision.action
    if action is Action.STOP:
        out_dir = str(around.plan.config.out_dir)
        raise ended.refused(stage.name, out_dir, look.decision.changes)
    if action is Action.SKIP:
        _say_skipped(look, around)
    else:
        _train(look, around)
    for link in link_legacy(stage, around.plan.config.out_dir):
        if action is not Action.SKIP:
            around.voice.say(f"weights: {link}", stage.name)
    result = None
    if stage is not TOKENIZER:
        result = records.read_result(stage.directory(around.plan.config.out_dir))
    return Outcome(stage=stage.name, action=action, result=result)


def _say_skipped(look: Look, around: Surroundings) -> None:
    result = records.read_result(look.stage.directory(around.plan.config.out_dir))
    took = f" at step {result.steps} after {result.seconds:.1f} s" if result is not None else ""
    around.voice.say(f"complete{took}: nothing to do", look.stage.name)
    if look.found.step_dir is not None:
        around.voice.say(f"it would go on with: {shlex.join(look.record.command)}", look.stage.name)


def _train(look: Look, around: Surroundings) -> None:
    stage, directory = look.stage, look.stage.directory(around.plan.config.out_dir)
    step_dir = look.found.step_dir
    how = f"resumes from {step_dir}" if step_dir is not None else "starts"
    origin = f", from {look.start.parent}" if look.start.parent else ""
    around.voice.say(f"{how}{origin}", stage.name)
    around.voice.say(f"$ {shlex.join(look.record.command)}", stage.name)
    directory.mkdir(parents=True, exist_ok=True)
    records.write_record(directory, look.record)
    code = run_child(
        look.record.command,
        around.signals,
        around.lock,
        around.voice,
        stage=stage.name,
        started=lambda pid: records.write_record(directory, replace(look.record, pid=pid)),
    )
    _finish(look, around, code)


def _finish(look: Look, around: Surroundings, code: int) -> None:
    """Write down how a trainer ended; raise unless it ended well and nobody wants a stop."""
    stage, out_dir = look.stage, around.plan.config.out_dir
    files = describe_result(stage, out_dir) if code == 0 else []
    digest = result_digest(files)
    stop_code = around.signals.exit_code or (code if code in {130, 143} else None)
    if digest is not None:
        status = Status.COMPLETE
    else:
        status = Status.FAILED if stop_code is None else Status.INTERRUPTED
    finished = replace(
        look.record,
        status=status,
        finished_at=_now(),
        exit_code=code,
        result=files,
        digest=digest,
    )
    records.write_record(stage.directory(out_dir), finished)
    step = _step(latest_step(stage.checkpoint_dir(out_dir)))
    if stop_code is not None:
        raise ended.interrupted(stage.name, step, stop_code)
    if code:
        raise ended.failed(stage.name, step, code, around.voice.place)
    if digest is None:
        raise ended.resultless(stage.name)


def _step(path: Path | None) -> int | None:
    return None if path is None else step_number(path)


def _now() -> str:
    return clock.utc_now().isoformat(timespec="seconds")
