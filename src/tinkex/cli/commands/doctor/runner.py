"""Run checks concurrently with a timeout, and print their report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import click

from tinkex.cli.context import Context, Format, Screen
from tinkex.cli.format import escape_line, format_count
from tinkex.cli.output import Column, Output
from tinkex.errors import TinkexError

CheckStatus = Literal["ok", "warn", "fail"]
#: Timeout of a check.
CHECK_SECONDS = 5.0
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    status: CheckStatus
    message: str
    advice: str | None = None
    """Suggested fix."""


class Check(NamedTuple):
    """A named check."""

    name: str
    function: Callable[[Context], CheckResult]
    on_timeout: CheckResult
    """Result if the check times out."""


def run_checks(
    checks: Sequence[Check], context: Context, seconds: float | None = None
) -> list[tuple[str, CheckResult]]:
    """Run all checks concurrently; abandon those that exceed `seconds` (CHECK_SECONDS)."""
    runners = [_CheckThread(check, context) for check in checks]
    ends_at = time.monotonic() + (CHECK_SECONDS if seconds is None else seconds)
    for runner in runners:
        runner.join(max(0.0, ends_at - time.monotonic()))
    return [(runner.check.name, runner.result()) for runner in runners]


class _CheckThread(threading.Thread):
    """Runs one check in a daemon thread."""

    def __init__(self, check: Check, context: Context) -> None:
        super().__init__(name=f"tinkex-check-{check.name}", daemon=True)
        self.check = check
        self._context = context
        self._result: CheckResult | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self.check.function(self._context)
        except TinkexError as error:
            self._result = CheckResult("fail", error.message, error.hint)
        except OSError as error:
            self._result = CheckResult("fail", str(error))
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self) -> CheckResult:
        """Return the result so far; raise the check's unexpected error."""
        if self._error is not None:
            raise self._error
        return self._result or self.check.on_timeout


class DoctorReport(Output):
    """All results: a line per check, with its advice below."""

    def __init__(self, results: Sequence[tuple[str, CheckResult]]) -> None:
        self._results = results

    @property
    def is_healthy(self) -> bool:
        """Whether no check failed."""
        return self._count("fail") == 0

    def to_dict(self) -> dict[str, object]:
        """The results as JSON data."""
        checks = [
            {
                "name": name,
                "status": result.status,
                "message": result.message,
                "advice": result.advice,
            }
            for name, result in self._results
        ]
        return {"ok": self.is_healthy, "checks": checks}

    def columns(self) -> Sequence[Column]:
        """Status, name, message and advice."""
        return (Column("Status"), Column("Check"), Column("Found"), Column("What to do"))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per check."""
        return [
            [result.status, name, result.message, result.advice or ""]
            for name, result in self._results
        ]

    def title(self) -> str:
        """The overall result."""
        failed, warned = self._count("fail"), self._count("warn")
        if failed:
            return f"{format_count(failed, 'check')} failed."
        return f"Ready, with {format_count(warned, 'warning')}." if warned else "All checks passed."

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Print the report as lines, because the advice is too long for a table."""
        if format == "json":
            super().print(format, screen)
            return
        is_colored = screen is not None and screen.is_colored
        width = max((len(name) for name, _ in self._results), default=0)
        for name, result in self._results:
            mark = click.style(
                f"{result.status:<4}", fg=_COLORS[result.status] if is_colored else None
            )
            _print_line(f"{mark}  {name:<{width}}  {escape_line(result.message)}", is_colored)
            if result.advice:
                _print_line(f"{'':<4}  {'':<{width}}  -> {escape_line(result.advice)}", is_colored)
        _print_line(self.title(), is_colored)

    def _count(self, status: CheckStatus) -> int:
        return sum(result.status == status for _, result in self._results)


def _print_line(text: str, is_colored: bool) -> None:
    click.echo(text, color=is_colored)
