"""What a check found, and how all of them are run: at once, and none for too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import click

from tinkex.cli.context import Context, Format, Screen
from tinkex.cli.format import escape_line, format_count
from tinkex.cli.output import Column, Output
from tinkex.errors import TinkexError

CheckStatus = Literal["ok", "warn", "fail"]
#: A check that takes longer is given up.
CHECK_SECONDS = 5.0
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    status: CheckStatus
    message: str
    advice: str | None = None
    """What to do about it."""


class Check(NamedTuple):
    """One thing to look at."""

    name: str
    function: Callable[[Context], CheckResult]
    on_timeout: CheckResult
    """What to say if it does not end in time."""


def run_checks(
    checks: Sequence[Check], context: Context, seconds: float | None = None
) -> list[tuple[str, CheckResult]]:
    """Run all checks at once; one that hangs, CHECK_SECONDS if not told, is left behind."""
    runners = [_CheckThread(check, context) for check in checks]
    ends_at = time.monotonic() + (CHECK_SECONDS if seconds is None else seconds)
    for runner in runners:
        runner.join(max(0.0, ends_at - time.monotonic()))
    return [(runner.check.name, runner.result()) for runner in runners]


class _CheckThread(threading.Thread):
    """Runs one check; the process does not wait for it at its end."""

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
        except BaseException as error:  # noqa: BLE001 - raised again where somebody sees it
            self._error = error

    def result(self) -> CheckResult:
        """What was found by now."""
        if self._error is not None:
            raise self._error
        return self._result or self.check.on_timeout


class DoctorReport(Output):
    """All findings: a line each, and what to do below."""

    def __init__(self, results: Sequence[tuple[str, CheckResult]]) -> None:
        self._results = results

    @property
    def is_healthy(self) -> bool:
        """Whether nothing failed."""
        return self._count("fail") == 0

    def to_dict(self) -> dict[str, Any]:
        """The findings, and whether all is well."""
        checks = [
            {
                "name": name,
                "status": found.status,
                "message": found.message,
                "advice": found.advice,
            }
            for name, found in self._results
        ]
        return {"ok": self.is_healthy, "checks": checks}

    def columns(self) -> Sequence[Column]:
        """As in the lines."""
        return (Column("Status"), Column("Check"), Column("Found"), Column("What to do"))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per check."""
        return [
            [found.status, name, found.message, found.advice or ""] for name, found in self._results
        ]

    def title(self) -> str:
        """The verdict."""
        failed, warned = self._count("fail"), self._count("warn")
        if failed:
            return f"{format_count(failed, 'check')} failed."
        return f"Ready, with {format_count(warned, 'warning')}." if warned else "All is well."

    def print(self, format: Format = "table", screen: Screen | None = None) -> None:
        """Write the report to stdout; lines, since advice does not fit into a table."""
        if format == "json":
            super().print(format, screen)
            return
        is_colored = screen is not None and screen.is_colored
        width = max((len(name) for name, _ in self._results), default=0)
        for name, found in self._results:
            mark = click.style(
                f"{found.status:<4}", fg=_COLORS[found.status] if is_colored else None
            )
            _print_line(f"{mark}  {name:<{width}}  {escape_line(found.message)}", is_colored)
            if found.advice:
                _print_line(f"{'':<4}  {'':<{width}}  -> {escape_line(found.advice)}", is_colored)
        _print_line(self.title(), is_colored)

    def _count(self, status: CheckStatus) -> int:
        return sum(found.status == status for _, found in self._results)


def _print_line(text: str, is_colored: bool) -> None:
    click.echo(text, color=is_colored)
