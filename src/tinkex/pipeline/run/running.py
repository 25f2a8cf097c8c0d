"""A run of the pipeline, from the lock to the table of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinkex.errors import ConfigError
from tinkex.installation import install_command, missing_libraries
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run import materials
from tinkex.pipeline.run.child import forward_signals
from tinkex.pipeline.run.clearing import remove_stages
from tinkex.pipeline.run.demo import run_demo
from tinkex.pipeline.run.flags import RunFlags
from tinkex.pipeline.run.lock import lock_output_dir
from tinkex.pipeline.run.one_stage import StageContext, run_stage
from tinkex.pipeline.run.plan import RunPlan, check_data, make_run_plan
from tinkex.pipeline.run.records import StageStatus, read_record
from tinkex.pipeline.run.report import StageOutcome, append_results
from tinkex.pipeline.run.say import LOG_NAME, RunOutput
from tinkex.pipeline.run.stages import TOKENIZER, stages_from
from tinkex.pipeline.tensorboard import TensorBoard, TensorBoardError, start_tensorboard
from tinkex.units import format_count


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
    if materials.write_missing_samples(plan.stage_data, plan.config) or generated:
        place = plan.config.out_dir / materials.SAMPLES_DIR
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
