"""`tinkex run plot`: plot a metric of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.run.watch import fetch_all_steps
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.format import format_count
from tinkex.cli.id_completion import RUN, RUN_SUMMARY
from tinkex.cli.options import Argument, Command
from tinkex.cli.output import announce, show
from tinkex.cli.output.base import can_print_unicode
from tinkex.cli.progress import paged_progress_bar, print_status
from tinkex.cli.prompts import plot_output_option
from tinkex.cli.short_ids import resolve_run
from tinkex.headline_metrics import HEADLINE_METRICS, primary_metric

if TYPE_CHECKING:
    from tinkex.types import RunStep


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
