"""`tinkex run watch` and `plot`: the metrics of a training run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.client import rest_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import INTERRUPTED, CliError
from tinkex.cli.format import format_count
from tinkex.cli.id_arguments import RUN, RUN_SUMMARY, resolve_run
from tinkex.cli.options import Argument, Command, Duration
from tinkex.cli.output import announce, show
from tinkex.cli.output.base import can_print_unicode
from tinkex.cli.progress import paged_progress_bar, print_status
from tinkex.cli.prompts import plot_output_option
from tinkex.display import HEADLINE_METRICS, primary_metric

if TYPE_CHECKING:
    from tinkex.cli.output.run_watch import RunView
    from tinkex.client.rest import RestClient
    from tinkex.types import RunMetricsResponse, RunStep

PAGE_SIZE = 1000


def fetch_run_metrics(
    client: RestClient, run_id: str, limit: int = PAGE_SIZE, after: int | None = None
) -> RunMetricsResponse:
    """Fetch steps of a run; raise CliError if the server does not report metrics."""
    from tinkex.errors import NotFoundError

    try:
        return client.get_run_metrics(run_id, limit, after).result()
    except NotFoundError as error:
        # Raises NotFoundError if the run does not exist.
        client.get_training_run(run_id).result()
        raise CliError(
            "This server does not report metrics of training runs",
            "Use a tinkex server; `tinkex run info` shows what this server reports.",
        ) from error


def fetch_all_steps(
    client: RestClient,
    run_id: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    page_size: int = PAGE_SIZE,
) -> tuple[RunMetricsResponse, list[RunStep]]:
    """Fetch the state of a run and all steps that the server stores."""
    page = fetch_run_metrics(client, run_id, page_size, after=0)
    steps = list(page.steps)
    while page.steps and len(page.steps) >= page_size:
        on_progress(len(steps), page.num_steps)
        page = fetch_run_metrics(client, run_id, page_size, after=steps[-1].cursor)
        steps += page.steps
    on_progress(len(steps), len(steps))
    return page, steps


#: Number of latest steps shown at first, as lines and as a curve.
FIRST_LINES, FIRST_POINTS = 10, 1000


@click.command(cls=Command)
@click.argument("run_id", type=RUN, cls=Argument, summary=RUN_SUMMARY)
@click.option("--once", is_flag=True, help="Show the current state and exit.")
@click.option(
    "--interval",
    type=Duration(),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="Time between updates.",
)
@click.option(
    "--last",
    type=click.IntRange(1, PAGE_SIZE),
    metavar="N",
    help=f"Start with the latest N steps.  [default: {FIRST_LINES}; more for a curve]",
)
@pass_context
def watch(context: Context, run_id: str, once: bool, interval: float, last: int | None) -> None:
    """Follow a training run live.

    Shows state, step, metrics, tokens per second and queue until the run ends. With -f json, prints
    one JSON object per line and step. Ctrl-C stops watching; the run continues.
    """
    first = last or (FIRST_POINTS if _is_live(context, once) else FIRST_LINES)
    try:
        # Like the run itself, tolerate short server outages.
        with rest_client(context, outage_seconds=60.0) as client, _open_view(context, once) as view:
            run_id = resolve_run(client, run_id)
            for page in _poll_pages(client, run_id, first, None if once else interval):
                view.show(page)
            view.finish()
    except KeyboardInterrupt:
        print_status("\nStopped watching; the run continues.")
        click.get_current_context().exit(INTERRUPTED)


def _is_live(context: Context, once: bool) -> bool:
    return context.stdout.is_terminal and not once and not context.is_json


@contextlib.contextmanager
def _open_view(context: Context, once: bool) -> Iterator[RunView]:
    """Open the view for the context: JSON lines, a live chart, or plain lines."""
    if _is_live(context, once):
        from tinkex.cli.output.live_view import live_view

        with live_view(context.stdout) as view:
            yield view
        return
    from tinkex.cli.output.run_watch import JsonRunView, TextRunView

    plain = TextRunView(once, context.stdout, context.stderr)
    yield JsonRunView(once) if context.is_json else plain


def _poll_pages(
    client: RestClient, run_id: str, first: int, interval: float | None
) -> Iterator[RunMetricsResponse]:
    """Poll the state of a run; each page contains the new steps."""
    page = fetch_run_metrics(client, run_id, first)
    # The first page always ends with the newest step.
    cursor, has_all = 0, True
    while True:
        yield page
        cursor = page.steps[-1].cursor if page.steps else cursor
        if interval is None or (is_finished(page) and has_all):
            return
        if has_all:
            time.sleep(interval)
        page = fetch_run_metrics(client, run_id, PAGE_SIZE, after=cursor)
        has_all = len(page.steps) < PAGE_SIZE


def is_finished(page: RunMetricsResponse) -> bool:
    """Whether the session has ended and no work is queued or running."""
    return page.status != "active" and page.num_waiting + page.num_running == 0


def _complete_metric(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = (*HEADLINE_METRICS, "tokens", "seconds", "tokens_per_second")
    return [name for name in names if name.startswith(incomplete)]


@click.command(cls=Command)
@click.argument("run_id", type=RUN, cls=Argument, summary=RUN_SUMMARY)
@click.option(
    "--metric",
    metavar="NAME",
    shell_complete=_complete_metric,
    help="Metric to plot: loss, tokens, seconds, tokens_per_second, or a metric of the run such as "
    "reward, accuracy, margin or kl.  [default: reward if the run has it, else loss]",
)
@plot_output_option()
@pass_context
def plot(context: Context, run_id: str, metric: str | None, output: Path | None) -> None:
    """Plot a metric of a training run."""
    with (
        rest_client(context) as client,
        paged_progress_bar(context, "Fetching steps") as on_progress,
    ):
        run_id = resolve_run(client, run_id)
        page, steps = fetch_all_steps(client, run_id, on_progress)
    if not page.is_whole:
        print_status("Note: the server no longer has the oldest steps of this run.")
    from tinkex.cli.output.plots import RunPlot

    metric = metric or primary_metric(steps[-1].metrics if steps else {})
    _check_metric(metric, steps)
    result = RunPlot(run_id, metric, steps, is_unicode=can_print_unicode())
    if output is None:
        show(context, result)
        return
    path = output.expanduser()
    result.write(path)
    data = {"training_run_id": run_id, "metric": metric, "num_steps": len(steps), "output": output}
    announce(context, f"Wrote {format_count(len(steps), 'step')} to {output}", data)


def _check_metric(metric: str, steps: list[RunStep]) -> None:
    from tinkex.cli.output.plots import metric_names

    known = metric_names(steps)
    if metric not in known:
        raise CliError(f"This run has no metric {metric!r}", f"Available: {', '.join(known)}.")
