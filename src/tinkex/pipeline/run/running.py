"""A run of the pipeline, from the lock to the table of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinkex.errors import ConfigError
from tinkex.installation import install_command, missing_libraries
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run import materials
from tinkex.pipeline.run.child import passing_signals
from tinkex.pipeline.run.clearing import clear
from tinkex.pipeline.run.demo import demonstrate
from tinkex.pipeline.run.flags import RunFlags
from tinkex.pipeline.run.lock import locked
from tinkex.pipeline.run.one_stage import Surroundings, run_stage
from tinkex.pipeline.run.plan import RunPlan, check_data, make_plan
from tinkex.pipeline.run.records import Status, read_record
from tinkex.pipeline.run.report import Outcome, append_results
from tinkex.pipeline.run.say import LOG_NAME, Voice
from tinkex.pipeline.run.stages import TOKENIZER, from_stage
from tinkex.pipeline.tensorboard import TensorBoard, TensorBoardError, start_tensorboard
from tinkex.units import format_count


def run_pipeline(config: PipelineConfig, flags: RunFlags, voice: Voice) -> list[Outcome]:
    """Train every stage that is not done; raises RunEnded if one does not come to its end."""
    _check_installed()
    with locked(config.out_dir) as lock, passing_signals() as signals:
        voice = voice.logging_to(config.out_dir / LOG_NAME)
        plan = make_plan(config, flags)
        _throw_away(plan, voice)
        _prepare_data(plan, voice)
        around = Surroundings(plan=plan, voice=voice, lock=lock, signals=signals)
        with _board(config, voice):
            outcomes = [_note(plan, run_stage(stage, around)) for stage in plan.stages]
            demonstrate(outcomes, around)
    return outcomes


def _check_installed() -> None:
    if missing := missing_libraries("torch"):
        raise ConfigError(
            f"the pipeline needs {', '.join(missing)}, not installed here",
            hint=f"Run: {install_command('pipeline')}",
        )


def _throw_away(plan: RunPlan, voice: Voice) -> None:
    if plan.flags.restart_from is None:
        return
    for name in clear(from_stage(plan.flags.restart_from), plan.config.out_dir):
        voice.say("thrown away, as --restart-from says", name)


def _prepare_data(plan: RunPlan, voice: Voice) -> None:
    """Have all data there and read once, so that a wrong line is told before hours of training."""
    generated = [name for name, one in plan.materials.items() if one.is_generated]
    if materials.write_missing(plan.materials, plan.config) or generated:
        place = plan.config.out_dir / materials.SAMPLES_DIR
        names = ", ".join(f"{name.upper()}_JSON" for name in generated)
        voice.say(f"no data given for {', '.join(generated)}: small generated files in {place}")
        voice.say(f"(set {names} to train on your own)")
    for stage in plan.stages:
        record = read_record(stage.directory(plan.config.out_dir))
        if stage is TOKENIZER or (record is not None and record.status is Status.COMPLETE):
            continue
        num_rows = check_data(plan, stage)
        voice.say(
            f"data: {plan.materials[stage.name].path}, {format_count(num_rows, 'row')}", stage.name
        )


def _note(plan: RunPlan, outcome: Outcome) -> Outcome:
    append_results(plan.config.results_path, [outcome], plan.config.out_dir)
    return outcome


@contextmanager
def _board(config: PipelineConfig, voice: Voice) -> Iterator[None]:
    """TensorBoard for as long as the run lasts; without it, everything goes on."""
    board = _started_board(config, voice) if config.tf_dir and config.tb_auto else None
    try:
        yield
    finally:
        if board is not None and not config.tb_keep:
            board.stop()


def _started_board(config: PipelineConfig, voice: Voice) -> TensorBoard | None:
    assert config.tf_dir is not None
    try:
        board = start_tensorboard(config.tf_dir, host=config.tb_host, port=config.tb_port)
    except TensorBoardError as error:
        voice.say(f"TensorBoard: {error.message}. {error.hint or ''}".rstrip())
        return None
    if board is not None:
        again = ", which was running already" if board.is_reused else ""
        voice.say(f"TensorBoard: {board.url} (pid {board.pid}{again})")
    return board
