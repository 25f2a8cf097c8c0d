"""How far training is: a bar with the live loss for a person, a line now and then for a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tinkex.cli.context import Context
from tinkex.cli.progress import print_status
from tinkex.server.headlines import format_metric, select_headlines

if TYPE_CHECKING:
    from tinkex.recipes.report import StepReport

#: So many lines in all, where there is no bar.
MAX_LOG_LINES = 20


@contextlib.contextmanager
def training_progress(context: Context, total: int) -> Iterator[Callable[[StepReport], None]]:
    """A function that shows each report; beside JSON it shows nothing."""
    if context.is_json:
        yield lambda report: None
    elif context.stderr.is_terminal:
        with _progress_bar(context, total) as shown:
            yield shown
    else:
        every = max(1, total // MAX_LOG_LINES)
        yield lambda report: _print_report(report, every)


def _print_report(report: StepReport, every: int) -> None:
    has_news = any(name.startswith("eval_") for name in report.metrics)
    if report.step == 1 or report.step == report.total or report.step % every == 0 or has_news:
        print_status(f"step {report.step}/{report.total}  {format_report(report)}")


def format_report(report: StepReport) -> str:
    """The figures of a step, in a few words."""
    more = select_headlines(report.metrics)
    figures = [f"{name} {format_metric(value)}" for name, value in more.items()]
    speed = f"{report.tokens_per_second:,.0f} tokens/s"
    return "  ".join([f"loss {format_metric(report.loss)}", *figures, speed])


@contextlib.contextmanager
def _progress_bar(context: Context, total: int) -> Iterator[Callable[[StepReport], None]]:
    from tinkex.cli.bars import make_training_bar

    progress = make_training_bar(context.stderr)
    task = progress.add_task("", total=total)

    def shown(report: StepReport) -> None:
        # Not before the first step: loading a tokenizer may take a while, and is no step.
        progress.start()
        progress.update(task, completed=report.step, description=format_report(report))

    try:
        yield shown
    finally:
        progress.stop()
