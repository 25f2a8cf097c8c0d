"""Output of `tinkex run watch` without a terminal: text lines or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import click

from tinkex.cli.context import Screen
from tinkex.cli.format import format_count, format_duration, wrap_text
from tinkex.cli.output.base import to_jsonable
from tinkex.display import format_metric, select_headlines

if TYPE_CHECKING:
    from tinkex.types import RunMetricsResponse, RunStep

#: Non-breaking space.
_NO_BREAK = "\xa0"
#: The session's status, for servers that do not report the state of a run.
_STATE_BY_STATUS = {"active": "training", "finished": "finished", "lost": "interrupted"}


def run_state(page: RunMetricsResponse) -> str:
    """Return the state of a run in one word."""
    return page.state or _STATE_BY_STATUS.get(page.status, page.status)


def headline_metrics(page: RunMetricsResponse, step: RunStep | None) -> dict[str, float]:
    """Return the headline metrics of a step; without a step, the newest loss."""
    if step is not None:
        return select_headlines(step_metrics(step))
    return {} if page.loss is None else {"loss": page.loss}


def step_metrics(step: RunStep) -> dict[str, float]:
    """Return all metrics of a step, including its loss."""
    return ({} if step.loss is None else {"loss": step.loss}) | step.metrics


class RunView(Protocol):
    """Shows the progress of a run."""

    def show(self, page: RunMetricsResponse) -> None:
        """Show the state and the new steps."""
        ...

    def finish(self) -> None:
        """Print the final state."""
        ...


class StepNumbering:
    """Numbers steps without gaps, even if the server deletes old ones in the meantime."""

    def __init__(self) -> None:
        self._last: int | None = None

    def number(self, steps: Sequence[RunStep]) -> list[tuple[int, RunStep]]:
        """Return new steps with their numbers."""
        numbered = []
        for step in steps:
            self._last = step.step if self._last is None else self._last + 1
            numbered.append((self._last, step))
        return numbered


def run_to_record(page: RunMetricsResponse, number: int, step: RunStep | None) -> dict[str, object]:
    """Return the state of a run as JSON data, at a step if one is given."""
    return {
        "training_run_id": page.training_run_id,
        "status": page.status,
        "state": run_state(page),
        "name": page.name,
        "step": number,
        "loss": page.loss if step is None else step.loss,
        "tokens": None if step is None else step.num_tokens,
        "tokens_per_second": page.tokens_per_second if step is None else step_speed(step),
        "seconds": None if step is None else step.seconds,
        "waiting": page.num_waiting,
        "running": page.num_running,
        "finished_at": None if step is None else step.finished_at,
        "metrics": {} if step is None else step.metrics,
    }


def step_speed(step: RunStep) -> float | None:
    """Tokens per second within one step."""
    return step.num_tokens / step.seconds if step.seconds > 0 else None


def format_headline(page: RunMetricsResponse, number: int, step: RunStep | None = None) -> str:
    """Format the state of a run in one line."""
    parts = [
        run_state(page),
        format_count(number, "step"),
        format_metric_list(headline_metrics(page, step), ", "),
        format_speed(page.tokens_per_second),
        format_queue(page),
    ]
    return ", ".join(parts)


def format_metric_list(metrics: Mapping[str, float], separator: str = "  ") -> str:
    """Format metrics with their names; `loss -` if there are none."""
    words = [f"{name} {format_metric(value)}" for name, value in metrics.items()]
    return separator.join(words) or "loss -"


def format_queue(page: RunMetricsResponse) -> str:
    """Format the number of waiting and running requests."""
    if not page.num_waiting and not page.num_running:
        return "nothing queued"
    return f"{page.num_waiting} waiting, {page.num_running} running"


def format_speed(tokens_per_second: float | None) -> str:
    """Format a speed in tokens per second."""
    return "- tokens/s" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


class JsonRunView:
    """Prints one JSON object per step; with --once only one."""

    def __init__(self, once: bool) -> None:
        self._once = once
        self._numbering = StepNumbering()
        self._status: str | None = None

    def show(self, page: RunMetricsResponse) -> None:
        """Print the new steps; without steps, print the state if it changed."""
        numbered = self._numbering.number(page.steps)
        if self._once:
            last = numbered[-1] if numbered else (page.num_steps, None)
            self._write(run_to_record(page, *last))
            return
        for number, step in numbered:
            self._write(run_to_record(page, number, step))
        if not numbered and page.status != self._status:
            self._write(run_to_record(page, page.num_steps, None))
        self._status = page.status

    def finish(self) -> None:
        """Do nothing: every state was printed."""

    def _write(self, data: dict[str, object]) -> None:
        click.echo(json.dumps(to_jsonable(data), allow_nan=False))


class TextRunView:
    """Prints one line per step; with --once only one."""

    def __init__(self, once: bool, stdout: Screen, stderr: Screen) -> None:
        self._once = once
        self._stdout, self._stderr = stdout, stderr
        self._numbering = StepNumbering()
        self._last: tuple[RunMetricsResponse, int, RunStep | None] | None = None

    def show(self, page: RunMetricsResponse) -> None:
        """Print the new steps."""
        numbered = self._numbering.number(page.steps)
        before = self._last[1:] if self._last else (page.num_steps, None)
        self._last = (page, *(numbered[-1] if numbered else before))
        if self._once:
            click.echo(_format_summary(*self._last, self._stdout))
            return
        for number, step in numbered:
            click.echo(format_step(number, step, page))

    def finish(self) -> None:
        """Print the final state to stderr."""
        if self._last is not None and not self._once:
            click.echo(_format_summary(*self._last, self._stderr), err=True)


def _format_summary(
    page: RunMetricsResponse, number: int, step: RunStep | None, screen: Screen
) -> str:
    """Format the state of a run; wrap only after a comma or colon."""
    text = (
        format_headline(page, number, step).replace(" ", _NO_BREAK).replace(f",{_NO_BREAK}", ", ")
    )
    return wrap_text(f"{page.training_run_id}: {text}", screen).replace(_NO_BREAK, " ")


def format_step(number: int, step: RunStep, page: RunMetricsResponse) -> str:
    """Format a step in one line."""
    return (
        f"step {number}  {format_metric_list(headline_metrics(page, step))}  "
        f"{format_count(step.num_tokens, 'token')}  {format_duration(step.seconds)}  "
        f"{format_speed(step_speed(step))}  {format_queue(page)}"
    )
