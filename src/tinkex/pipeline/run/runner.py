"""Run the pipeline: check data, train all stages, then demo the R1 model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinkex.display import format_count
from tinkex.errors import ConfigError
from tinkex.installation import install_command, missing_libraries
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.output_locks import lock_output_dir
from tinkex.pipeline.run import report, stage_files
from tinkex.pipeline.run.child import forward_signals, run_child
from tinkex.pipeline.run.plan import RunFlags, RunPlan, check_data, make_run_plan
from tinkex.pipeline.run.report import LOG_NAME, RunOutput, StageOutcome, append_results
from tinkex.pipeline.run.stage_files import remove_stages
from tinkex.pipeline.run.stage_records import StageAction, StageStatus, read_record
from tinkex.pipeline.run.stage_runner import StageContext, run_stage
from tinkex.pipeline.run.stage_specs import R1, TOKENIZER, stages_from
from tinkex.pipeline.train.tensorboard import TensorBoard, TensorBoardError, start_tensorboard


def run_demo(outcomes: Sequence[StageOutcome], context: StageContext) -> None:
    """Generate an answer with a newly trained R1 model; a failure does not fail the run."""
    config, output = context.plan.config, context.output
    is_new = any(
        outcome.stage == R1.name and outcome.action is not StageAction.SKIP for outcome in outcomes
    )
    if not (is_new and config.r1_demo):
        return
    output.write_line(f"prompt: {config.r1_demo_prompt}", R1.name)
    code = run_child(_demo_command(config), context.signals, context.lock, output, stage=R1.name)
    if context.signals.received is not None:
        raise report.interrupted_after_training(context.signals.received)
    if code:
        output.write_line("the demo failed; training is complete", R1.name)


def _demo_command(config: PipelineConfig) -> list[str]:
    values = {
        "--prompt": config.r1_demo_prompt,
        "--max_new_tokens": config.r1_demo_max_new_tokens,
        "--temperature": config.r1_demo_temperature,
        "--top_p": config.r1_demo_top_p,
        "--seed": config.r1_demo_seed,
        "--device": config.r1_demo_device or config.settings().device,
    }
    # name=value, because a prompt may start with a dash.
    options = [f"{name}={value}" for name, value in values.items()]
    folder = str(R1.model_dir(config.out_dir))
    return [sys.executable, "-m", "tinkex.pipeline.generate", folder, *options]


def run_pipeline(config: PipelineConfig, flags: RunFlags, output: RunOutput) -> list[StageOutcome]:
    """Train all stages that are not complete; raises RunStopped if one does not complete."""
    _check_installed()
    with lock_output_dir(config.out_dir) as lock, forward_signals() as signals:
        output = output.with_log_file(config.out_dir / LOG_NAME)
        plan = make_run_plan(config, flags)
        _clear_restarted(plan, output)
        _prepare_data(plan, output)
        context = StageContext(plan=plan, output=output, lock=lock, signals=signals)
        with _tensorboard(config, output):
            outcomes = [_record_outcome(plan, run_stage(stage, context)) for stage in plan.stages]
            run_demo(outcomes, context)
    return outcomes


def _check_installed() -> None:
    if missing := missing_libraries("torch"):
        raise ConfigError(
            f"the pipeline needs {', '.join(missing)}, which is not installed",
            hint=f"Run: {install_command('pipeline')}",
        )


def _clear_restarted(plan: RunPlan, output: RunOutput) -> None:
    if plan.flags.restart_from is None:
        return
    for name in remove_stages(stages_from(plan.flags.restart_from), plan.config.out_dir):
        output.write_line("deleted because of --restart-from", name)


def _prepare_data(plan: RunPlan, output: RunOutput) -> None:
    """Generate missing data and parse all rows, so that errors appear before training starts."""
    generated = [name for name, data in plan.stage_data.items() if data.is_generated]
    if stage_files.write_missing_samples(plan.stage_data, plan.config) or generated:
        folder = plan.config.out_dir / stage_files.SAMPLES_DIR
        names = ", ".join(f"{name.upper()}_JSON" for name in generated)
        output.write_line(
            f"no data given for {', '.join(generated)}: using generated sample data in {folder}"
        )
        output.write_line(f"(set {names} to use your own data)")
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
    """Run TensorBoard during the run; if it fails to start, the run continues."""
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
        note = ", already running" if board.is_reused else ""
        output.write_line(f"TensorBoard: {board.url} (pid {board.pid}{note})")
    return board
