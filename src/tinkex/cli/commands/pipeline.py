"""`tinkex pipeline`: train a base model from scratch and inspect its stages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.format import format_count
from tinkex.cli.options import Argument, F, Group
from tinkex.cli.output import announce, show
from tinkex.cli.output.base import can_print_unicode, suggest_commands
from tinkex.cli.progress import print_status
from tinkex.cli.prompts import confirm, plot_output_option

if TYPE_CHECKING:
    from tinkex.pipeline.config import PipelineConfig
    from tinkex.pipeline.run.report import StageOutcome

STAGES = ("tokenizer", "pretrain", "sft", "dpo", "r1")
#: The name that the suggested commands give to the trained model.
MODEL_NAME = "my-model"


def out_dir_option(command: F) -> F:
    """Add --out-dir, which selects the pipeline."""
    return click.option(
        "--out-dir",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Directory of the stages.  [default: OUT_DIR, or out]",
    )(command)


@click.group(cls=Group)
def pipeline() -> None:
    """Train a model from scratch, stage by stage."""


@pipeline.command()
@out_dir_option
@click.option("--smoke-test", is_flag=True, help="Train a small model for a few steps.")
@click.option("--run-r1", is_flag=True, help="Also train the reasoning stage.")
@click.option(
    "--skip-pretrain",
    is_flag=True,
    help="Start SFT from PRETRAINED_PATH or an existing pretrained model.",
)
@click.option("--force-pretrain", is_flag=True, help="Same as --restart-from pretrain.")
@click.option(
    "--restart-from",
    type=click.Choice(STAGES),
    help="Delete this stage and all later ones, and train them again.",
)
@pass_context
def run(
    context: Context,
    out_dir: Path | None,
    smoke_test: bool,
    run_r1: bool,
    skip_pretrain: bool,
    force_pretrain: bool,
    restart_from: str | None,
) -> None:
    """Train a model from scratch: tokenizer, pretrain, SFT, DPO and optionally reasoning.

    After an interruption, the same command resumes; completed stages are skipped. Settings are
    environment variables: PRETRAIN_JSON, MODEL_HIDDEN_SIZE, SAVE_INTERVAL and more.
    """
    from tinkex.pipeline.config import list_ignored_variables
    from tinkex.pipeline.run.plan import RunFlags
    from tinkex.pipeline.run.report import RunOutput
    from tinkex.pipeline.run.runner import run_pipeline

    if force_pretrain:
        restart_from = restart_from or "pretrain"
    if skip_pretrain and restart_from == "pretrain":
        raise click.UsageError("--skip-pretrain cannot be combined with restarting from pretrain.")
    for note in list_ignored_variables():
        print_status(f"Note: {note}")
    config = _read_pipeline_config(out_dir, is_smoke=smoke_test)
    output = RunOutput(None if context.is_json else sys.stderr, reserve_stdout=True)
    flags = RunFlags(
        smoke_test=smoke_test,
        run_r1=run_r1,
        skip_pretrain=skip_pretrain,
        restart_from=restart_from,
    )
    outcomes = run_pipeline(config, flags, output)
    from tinkex.cli.output.pipeline import PipelineResults

    show(context, PipelineResults(str(config.out_dir), outcomes))
    suggest_commands(context, next_commands(config, outcomes))


def next_commands(config: PipelineConfig, outcomes: Sequence[StageOutcome]) -> list[list[str]]:
    """Suggest commands that inspect the run and use the model of its last stage."""
    trained = [outcome.stage for outcome in outcomes if outcome.result is not None]
    if not trained:
        return []
    from tinkex.pipeline.run.stage_specs import STAGES_BY_NAME

    # Settings from variables become options, because another shell may not have them.
    out_dir_args = ["--out-dir", str(config.out_dir)]
    folder = STAGES_BY_NAME[trained[-1]].model_dir(config.out_dir)
    curves = [["tinkex", "pipeline", "tensorboard", str(config.tf_dir)]] if config.tf_dir else []
    return [
        ["tinkex", "pipeline", "status", *out_dir_args],
        ["tinkex", "pipeline", "plot", trained[-1], *out_dir_args],
        *curves,
        ["tinkex", "model", "add", MODEL_NAME, str(folder)],
        ["tinkex", "chat", MODEL_NAME],
    ]


@pipeline.command()
@out_dir_option
@pass_context
def status(context: Context, out_dir: Path | None) -> None:
    """Show the progress of each stage."""
    from tinkex.cli.output.pipeline import StageList
    from tinkex.pipeline.run.status import list_stage_summaries

    directory = _read_pipeline_config(out_dir).out_dir
    views = list_stage_summaries(directory)
    if not views and not context.is_json:
        print_status(
            f"No stage has started in {directory}; `tinkex pipeline run` starts the first one."
        )
        return
    show(context, StageList(str(directory), views))
    for view in views:
        if view.stale:
            print_status(
                f"{view.stale}; `tinkex pipeline run --restart-from {view.stage}` trains it again"
            )


@pipeline.command()
@out_dir_option
@click.option("--from", "first", type=click.Choice(STAGES), help="Only this stage and later ones.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@pass_context
def clean(context: Context, out_dir: Path | None, first: str | None, yes: bool) -> None:
    """Delete the outputs of the stages: checkpoints, models, metrics."""
    from tinkex.pipeline.output_locks import lock_output_dir
    from tinkex.pipeline.run.stage_files import existing_stages, remove_stages
    from tinkex.pipeline.run.stage_specs import stages_from

    directory = _read_pipeline_config(out_dir).out_dir
    stages = existing_stages(stages_from(first or STAGES[0]), directory)
    names = [stage.name for stage in stages]
    if not names:
        announce(context, f"Nothing to remove in {directory}", {"removed": []})
        return
    if not yes and not confirm(f"Remove {', '.join(names)} from {directory}?"):
        raise CliError("Nothing was removed", "Answer y, or pass --yes.")
    with lock_output_dir(directory):
        removed = remove_stages(stages, directory)
    announce(context, f"Removed {', '.join(removed)} from {directory}", {"removed": removed})


@pipeline.command()
@click.argument("stage", type=click.Choice(STAGES[1:]), cls=Argument, summary="Stage to plot.")
@out_dir_option
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    metavar="NAME",
    help="Metric to plot: loss, learning_rate, or another metric of the stage.",
)
@plot_output_option()
@pass_context
def plot(
    context: Context, stage: str, out_dir: Path | None, metric: str, output: Path | None
) -> None:
    """Plot a metric of a stage."""
    from tinkex.cli.output.pipeline import StagePlot, recorded_metrics
    from tinkex.pipeline.run.status import read_metrics

    metric_rows = read_metrics(stage, _read_pipeline_config(out_dir).out_dir)
    known = recorded_metrics(metric_rows)
    if metric not in known:
        raise CliError(f"{stage} has no metric {metric!r}", f"Available: {', '.join(known)}.")
    result = StagePlot(stage, metric, metric_rows, is_unicode=can_print_unicode())
    if output is None:
        show(context, result)
        return
    result.write(output.expanduser())
    data = {"stage": stage, "metric": metric, "num_lines": len(metric_rows), "output": str(output)}
    announce(context, f"Wrote {format_count(len(metric_rows), 'line')} to {output}", data)


@pipeline.command()
@click.argument(
    "directory",
    metavar="[DIR]",
    required=False,
    type=click.Path(path_type=Path, file_okay=False),
    cls=Argument,
    summary="Log directory.  [default: TF_DIR, or tf_dir]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port to listen on.  [default: TB_PORT, or 6006]",
)
@pass_context
def tensorboard(context: Context, directory: Path | None, port: int | None) -> None:
    """Show the curves of a run in TensorBoard, until Ctrl-C.

    A run starts its own TensorBoard and stops it when it ends; this command shows the curves later.
    """
    config = _read_pipeline_config(None)
    logdir = config.tf_dir if directory is None else directory.expanduser()
    if logdir is None or not logdir.is_dir():
        problem = "TF_DIR is empty" if logdir is None else f"{logdir} does not exist"
        raise CliError(
            f"No curves to show: {problem}",
            "`tinkex pipeline run` writes curves to TF_DIR; pass that directory as DIR.",
        )
    serve_tensorboard(context, logdir, config.tb_host, config.tb_port if port is None else port)


def _read_pipeline_config(out_dir: Path | None, *, is_smoke: bool = False) -> PipelineConfig:
    from tinkex.pipeline.config import read_config

    config = read_config(is_smoke=is_smoke)
    return config if out_dir is None else replace(config, out_dir=out_dir.expanduser())


def serve_tensorboard(context: Context, logdir: Path, host: str, port: int) -> None:
    """Serve a log directory until Ctrl-C, the normal way to stop this command."""
    from tinkex.installation import install_command, missing_libraries
    from tinkex.pipeline.train.tensorboard import start_tensorboard

    if missing_libraries("pipeline"):
        raise CliError("TensorBoard is not installed", f"Run: {install_command('pipeline')}")
    with _return_on_signals():
        board = start_tensorboard(logdir, host=host, port=port)
        assert board is not None  # it is installed
        with board:
            note = ", started by a running pipeline" if board.is_reused else "; Ctrl-C stops it"
            announce(
                context,
                f"TensorBoard shows {logdir} at {board.url}{note}.",
                {"url": board.url, "pid": board.pid, "directory": str(logdir)},
            )
            if not board.is_reused:
                board.wait()
                raise CliError(f"TensorBoard exited; see its log {board.log_file}")


@contextmanager
def _return_on_signals() -> Iterator[None]:
    """Leave the block on Ctrl-C or SIGTERM, which both stop a server."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)
