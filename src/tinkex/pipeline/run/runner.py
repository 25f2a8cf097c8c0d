"""The last word of a run: the model that has learned to reason is asked something."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinkex.errors import ConfigError
from tinkex.installation import install_command, missing_libraries
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run import data_files, run_errors
from tinkex.pipeline.run.child import forward_signals, run_child
from tinkex.pipeline.run.lock import lock_output_dir
from tinkex.pipeline.run.plan import RunFlags, RunPlan, check_data, make_run_plan
from tinkex.pipeline.run.report import StageOutcome, append_results
from tinkex.pipeline.run.run_output import LOG_NAME, RunOutput
from tinkex.pipeline.run.stage_decision import StageAction
from tinkex.pipeline.run.stage_files import remove_stages
from tinkex.pipeline.run.stage_records import StageStatus, read_record
from tinkex.pipeline.run.stage_runner import StageContext, run_stage
from tinkex.pipeline.run.stage_specs import R1, TOKENIZER, stages_from
from tinkex.pipeline.train.tensorboard import TensorBoard, TensorBoardError, start_tensorboard
from tinkex.units import format_count


def run_demo(outcomes: Sequence[StageOutcome], context: StageContext) -> None:
    """Ask what R1 has just made; that it cannot be asked is told, and is no failure of the run."""
    config, voice = context.plan.config, context.output
    is_new = any(one.stage == R1.name and one.action is not StageAction.SKIP for one in outcomes)
    if not (is_new and config.r1_demo):
        return
    voice.write_line(f"asked: {config.r1_demo_prompt}", R1.name)
    code = run_child(_demo_command(config), context.signals, context.lock, voice, stage=R1.name)
    if context.signals.received is not None:
        raise run_errors.interrupted_after_training(context.signals.received)
    if code:
        voice.write_line("the model could not be asked; its training is complete", R1.name)


def _demo_command(config: PipelineConfig) -> list[str]:
    told = {
        "--prompt": config.r1_demo_prompt,
        "--max_new_tokens": config.r1_demo_max_new_tokens,
        "--temperature": config.r1_demo_temperature,
        "--top_p": config.r1_demo_top_p,
        "--seed": config.r1_demo_seed,
        "--device": config.r1_demo_device or config.device,
    }
    # One word each: a prompt may begin with a dash.
    options = [f"{name}={value}" for name, value in told.items()]
    folder = str(R1.model_dir(config.out_dir))
    return [sys.executable, "-m", "tinkex.pipeline.generate", folder, *options]


def run_pipeline(config: PipelineConfig, flags: RunFlags, output: RunOutput) -> list[StageOutcome]:
    """Train every stage that is not done; raises RunEnded if one does not come to its end."""
    _check_installed()
    with lock_output_dir(config.out_dir) as lock, forward_signals() as signals:
        output = output.with_log_file(config.out_dir / LOG_NAME)
        plan = make_run_plan(config, flags)
        _clear_restarted(plan, output)
        _prepare_data(plan, output)
        around = StageContext(plan=plan, output=output, lock=lock, signals=signals)
        with _tensorboard(config, output):
            outcomes = [_record_outcome(plan, run_stage(stage, around)) for stage in plan.stages]
            run_demo(outcomes, around)
    return outcomes


def _check_installed() -> None:
    if missing := missing_libraries("torch"):
        raise ConfigError(
            f"the pipeline needs {', '.join(missing)}, not installed here",
            hint=f"Run: {install_command('pipeline')}",
        )


def _clear_restarted(plan: RunPlan, output: RunOutput) -> None:
    if plan.flags.restart_from is None:
        return
    for name in remove_stages(stages_from(plan.flags.restart_from), plan.config.out_dir):
        output.write_line("thrown away, as --restart-from says", name)


def _prepare_data(plan: RunPlan, output: RunOutput) -> None:
    """Have all data there and read once, so that a wrong line is told before hours of training."""
    generated = [name for name, one in plan.stage_data.items() if one.is_generated]
    if data_files.write_missing_samples(plan.stage_data, plan.config) or generated:
        place = plan.config.out_dir / data_files.SAMPLES_DIR
        names = ", ".join(f"{name.upper()}_JSON" for name in generated)
        output.write_line(
            f"no data given for {', '.join(generated)}: small generated files in {place}"
        )
        output.write_line(f"(set {names} to train on your own)")
    for stage in plan.stages:
        record = read_record(stage.directory(plan.config.out_dir))
        if stage is TOKENIZER or (record is not None and record.status is StageStatus.COMPLETE):
            continue
        num_rows = check_data(plan, stage)
        output.write_line(
            f"data: {plan.stage_data[stage.name].path}, {format_count(num_rows, 'row')}", stage.name
        )


def _record_outcome(plan: RunPlan, outcome: StageOutcome) -> StageOutcome:
    append_results(plan.config.results_path, [outcome], plan.config.out_dir)
    return outcome


@contextmanager
def _tensorboard(config: PipelineConfig, output: RunOutput) -> Iterator[None]:
    """TensorBoard for as long as the run lasts; without it, everything goes on."""
    board = _start_tensorboard(config, output) if config.tf_dir and config.tb_auto else None
    try:
        yield
    finally:
        if board is not None and not config.tb_keep:
            board.stop()


def _start_tensorboard(config: PipelineConfig, output: RunOutput) -> TensorBoard | None:
    assert config.tf_dir is not None
    try:
        board = start_tensorboard(config.tf_dir, host=config.tb_host, port=config.tb_port)
    except TensorBoardError as error:
        output.write_line(f"TensorBoard: {error.message}. {error.hint or ''}".rstrip())
        return None
    if board is not None:
        again = ", which was running already" if board.is_reused else ""
        output.write_line(f"TensorBoard: {board.url} (pid {board.pid}{again})")
    return board
