"""What a check found, and how all of them are run: at once, and none for too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import click

from tinkex.cli.context import Context, Format, Screen
from tinkex.cli.format import format_count, plain_line
from tinkex.cli.output import Column, Output
from tinkex.errors import TinkexError

Status = Literal["ok", "warn", "fail"]
#: A check that takes longer is given up.
CHECK_SECONDS = 5.0
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    status: Status
    message: str
    advice: str | None = None
    """What to do about it."""


class Check(NamedTuple):
    """One thing to look at."""

    name: str
    look: Callable[[Context], Finding]
    when_late: Finding
    """What to say if it does not end in time."""


def run_checks(
    checks: Sequence[Check], context: Context, seconds: float | None = None
) -> list[tuple[str, Finding]]:
    """Run all checks at once; one that hangs, CHECK_SECONDS if not told, is left behind."""
    runners = [_Runner(check, context) for check in checks]
    ends_at = time.monotonic() + (CHECK_SECONDS if seconds is None else seconds)
    for runner in runners:
        runner.join(max(0.0, ends_at - time.monotonic()))
    return [(runner.check.name, runner.result()) for runner in runners]


class _Runner(threading.Thread):
    """Runs one check; the process does not wait for it at its end."""

    def __init__(self, check: Check, context: Context) -> None:
        super().__init__(name=f"tinkex-check-{check.name}", daemon=True)
        self.check = check
        self._context = context
        self._found: Finding | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self.check.look(self._context)
        except TinkexError as error:
            self._found = Finding("fail", error.message, error.hint)
        except OSError as error:
            self._found = Finding("fail", str(error))
        except BaseException as error:  # noqa: BLE001 - raised again where somebody sees it
            self._error = error

    def result(self) -> Finding:
        """What was found by now."""
        if self._error is not None:
            raise self._error
        return self._found or self.check.when_late


class Report(Output):
    """All findings: a line each, and what to do below."""

    def __init__(self, findings: Sequence[tuple[str, Finding]]) -> None:
        self._findings = findings

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
            for name, found in self._findings
        ]
        return {"ok": self.is_healthy, "checks": checks}

    def columns(self) -> Sequence[Column]:
        """As in the lines."""
        return (Column("Status"), Column("Check"), Column("Found"), Column("What to do"))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per check."""
        return [
            [found.status, name, found.message, found.advice or ""]
            for name, found in self._findings
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
        width = max((len(name) for name, _ in self._findings), default=0)
        for name, found in self._findings:
            mark = click.style(
                f"{found.status:<4}", fg=_COLORS[found.status] if is_colored else None
            )
            _line(f"{mark}  {name:<{width}}  {plain_line(found.message)}", is_colored)
            if found.advice:
                _line(f"{'':<4}  {'':<{width}}  -> {plain_line(found.advice)}", is_colored)
        _line(self.title(), is_colored)

    def _count(self, status: Status) -> int:
        return sum(found.status == status for _, found in self._findings)


def _line(text: str, is_colored: bool) -> None:
    click.echo(text, color=is_colored)
