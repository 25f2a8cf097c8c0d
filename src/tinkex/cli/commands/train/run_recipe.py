"""Run a recipe for `tinkex train`: progress, interruption and the final report."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.sampling_options import default_model
from tinkex.cli.context import Context
from tinkex.cli.errors import INTERRUPTED
from tinkex.cli.format import escape_line, format_count
from tinkex.cli.id_arguments import expand_path
from tinkex.cli.output import PropertiesOutput, show
from tinkex.cli.output.base import build_command_line, suggest_commands
from tinkex.cli.progress import print_status, spinner, stderr_console
from tinkex.cli.prompts import check_run_directory
from tinkex.data.rows import RecipeRow
from tinkex.display import format_metric, select_headlines
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.ids import parse_tinker_path
from tinkex.recipes.plan import Plan
from tinkex.recipes.report import RecipeResult
from tinkex.recipes.run import DEFAULT_RUNS_DIR, Run, RunOptions

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient
    from tinkex.recipes.report import StepReport

PlanT = TypeVar("PlanT", bound=Plan)
DataT = TypeVar("DataT")
RowT = TypeVar("RowT", bound=RecipeRow)

SignalHandler = Callable[[int, FrameType | None], object] | int | None

#: Options of the run, not of its plan.
RUN_OPTION_NAMES = ("run_dir", "restart", "accept_changes")
#: Maximum number of progress lines without a terminal.
MAX_LOG_LINES = 20


@contextlib.contextmanager
def training_progress(context: Context, total: int) -> Iterator[Callable[[StepReport], None]]:
    """Yield a callback that shows step reports; with JSON output it shows nothing."""
    if context.is_json:
        yield lambda report: None
    elif context.stderr.is_terminal:
        with _progress_bar(context, total) as on_report:
            yield on_report
    else:
        every = max(1, total // MAX_LOG_LINES)
        yield lambda report: _print_report(report, every)


def _print_report(report: StepReport, every: int) -> None:
    has_eval = any(name.startswith("eval_") for name in report.metrics)
    if report.step == 1 or report.step == report.total or report.step % every == 0 or has_eval:
        print_status(f"step {report.step}/{report.total}  {format_report(report)}")


def format_report(report: StepReport) -> str:
    """Format loss, headline metrics and speed of a step."""
    headlines = select_headlines(report.metrics)
    metrics = [f"{name} {format_metric(value)}" for name, value in headlines.items()]
    speed = f"{report.tokens_per_second:,.0f} tokens/s"
    return "  ".join([f"loss {format_metric(report.loss)}", *metrics, speed])


@contextlib.contextmanager
def _progress_bar(context: Context, total: int) -> Iterator[Callable[[StepReport], None]]:
    from tinkex.progress_bar import make_step_progress

    progress = make_step_progress(stderr_console(context.stderr))
    task = progress.add_task("", total=total)

    def on_report(report: StepReport) -> None:
        # Start with the first step, so that the rate does not include loading the tokenizer.
        progress.start()
        progress.update(task, completed=report.step, description=format_report(report))

    try:
        yield on_report
    finally:
        progress.stop()


_STOPPING_NOTICE = "Stopping after the submitted steps; press Ctrl-C again to stop now."


class Recipe(Protocol[PlanT, DataT, RowT]):
    """The functions of a recipe module."""

    def open_data(self, plan: PlanT, /) -> DataT:
        """Open and validate the data."""
        ...

    def run(
        self,
        plan: PlanT,
        service: ServiceClient,
        options: RunOptions,
        tell: Callable[[str], None],
        data: DataT,
        /,
    ) -> Run[PlanT, RowT]:
        """Create a run; iterate over it to train."""
        ...


def run_recipe(
    context: Context,
    make_plan: Callable[..., PlanT],
    recipe: Recipe[PlanT, DataT, RowT],
    settings: Mapping[str, Any],
) -> None:
    """Run a recipe until it is complete or interrupted."""
    options = RunOptions(**{name: settings[name] for name in RUN_OPTION_NAMES})
    given = {name: settings[name] for name in settings if name not in RUN_OPTION_NAMES}
    if given["start_from"] is not None:
        given["start_from"] = expand_path(
            context, given["start_from"], "weights", needs_worker=True
        )
    needs_default = given["base_model"] is None and given["start_from"] is None
    # Validate the other settings now; only the server knows the default model.
    plan = make_plan(**(given | {"base_model": DEFAULT_MODEL} if needs_default else given))
    # Report a missing file before starting a server.
    data = recipe.open_data(plan)
    check_run_directory(options.run_dir or DEFAULT_RUNS_DIR)
    notices: list[str] = []
    with service_client(context) as client, spinner() as wait:
        notify = notices.append if context.is_json else wait.print_line
        if needs_default:
            models = client.get_server_capabilities().result().supported_models
            base_model = default_model(model for model in models if model.trainable is not False)
            plan = replace(plan, base_model=base_model)
        run = recipe.run(plan, client, options, notify, data)
        notify(
            f"Training {plan.base_model or plan.start_from} on "
            f"{format_count(len(run.rows), 'row')}: {format_count(run.total, 'step')}, "
            f"run directory {run.run_directory.directory}"
        )
        with (
            stop_on_interrupt(run, lambda: notify(_STOPPING_NOTICE)),
            training_progress(context, run.total) as on_report,
        ):
            for report in run:
                wait.close()
                on_report(report)
        assert run.result is not None  # the loop has ended
        if not run.result.is_complete:
            client.close("interrupted").result()
    _print_result(context, run.result, notices)


def _print_result(context: Context, result: RecipeResult, notices: list[str]) -> None:
    show(context, PropertiesOutput({**result.to_dict(), "notices": notices}, _result_rows(result)))
    if result.is_complete:
        suggest_commands(context, next_commands(context, result))
        return
    if not context.is_json:
        print_status(
            f"Stopped after step {result.step} of {result.total}; the same command resumes it."
        )
    click.get_current_context().exit(INTERRUPTED)


def next_commands(context: Context, result: RecipeResult) -> list[list[str]]:
    """Suggest commands that use the checkpoints of a complete run."""
    assert result.sampler_path is not None  # the run is complete
    run_id = parse_tinker_path(result.sampler_path).run_id
    return [
        build_command_line(context, "chat", result.sampler_path),
        build_command_line(
            context, "sample", "--model-path", result.sampler_path, "--prompt", "Hello"
        ),
        build_command_line(context, "run", "plot", run_id),
        build_command_line(
            context, "checkpoint", "download", result.state_path or result.sampler_path
        ),
    ]


def _result_rows(result: RecipeResult) -> list[tuple[str, str]]:
    rows = [
        ("Steps", f"{result.step} of {result.total}"),
        ("Loss", format_metric(result.loss)),
        *((name, format_metric(value)) for name, value in result.metrics.items()),
        ("Training State", result.state_path or "-"),
        ("Sampler Weights", result.sampler_path or "-"),
        ("Run Directory", str(result.run_dir)),
    ]
    for sample in result.samples:
        rows += [("Prompt", escape_line(sample.prompt)), ("Answer", escape_line(sample.text))]
    return rows


class Stoppable(Protocol):
    """An object that can be stopped."""

    def stop(self) -> None:
        """Request a stop."""
        ...


@contextlib.contextmanager
def stop_on_interrupt(run: Stoppable, on_stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `run.stop()`; the next one has its default effect.

    Does nothing outside the main thread, which alone can handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, SignalHandler] = {}

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        run.stop()
        # The interrupted code may be writing to the same stream.
        with contextlib.suppress(RuntimeError):
            on_stop()

    for caught in (signal.SIGINT, signal.SIGTERM):
        before[caught] = signal.signal(caught, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
