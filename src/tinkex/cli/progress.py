"""How far a command is: bars for a person, lines for everybody, all on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import click

from tinkex.cli.context import Context, get_context
from tinkex.cli.format import wrap_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


#: Where the context of a command keeps the line about what it waits for.
_SPINNER_KEY = "tinkex.waiting"


def print_status(text: str) -> None:
    """Say one line about what is being done; a program that reads JSON hears of errors alone."""
    context = _current_context()
    if context.is_json:
        return
    ctx = click.get_current_context(silent=True)
    shown: StatusSpinner | None = None if ctx is None else ctx.meta.get(_SPINNER_KEY)
    with contextlib.nullcontext() if shown is None else shown.paused():
        click.echo(wrap_text(text, context.stderr), err=True)


def _current_context() -> Context:
    ctx = click.get_current_context(silent=True)
    return Context() if ctx is None else get_context(ctx)


class StatusSpinner:
    """What a command waits for: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._context = _current_context()
        self._progress: Progress | None = None

    def show(self, text: str) -> None:
        """Wait for something else from now on."""
        if self._context.is_json or not self._context.stderr.is_terminal:
            print_status(text)
            return
        from tinkex.cli.progress_bars import make_spinner

        self.close()
        self._progress = make_spinner(self._context.stderr)
        self._progress.add_task(text, total=None)
        self._progress.start()
        # Lines that are printed meanwhile must not run into this one.
        if (ctx := click.get_current_context(silent=True)) is not None:
            ctx.meta[_SPINNER_KEY] = self

    def print_line(self, text: str) -> None:
        """Print a line; one that ends in dots is what the command waits for next."""
        if text.endswith("..."):
            self.show(text)
            return
        self.close()
        print_status(text)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the line while something else is printed."""
        if self._progress is None:
            yield
            return
        self._progress.stop()
        yield
        self._progress.start()

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextlib.contextmanager
def spinner(text: str = "") -> Iterator[StatusSpinner]:
    """A line about what is waited for, which disappears from a terminal at the end."""
    with contextlib.closing(StatusSpinner()) as shown:
        if text:
            shown.show(text)
        yield shown


class ProgressBar:
    """One bar; without a terminal it counts and shows nothing."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress = progress
        self._task = task
        self.done = 0

    def update(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much if that is known better now."""
        self.done = done
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def advance(self, by: int = 1) -> None:
        """So much more is done."""
        self.update(self.done + by)


@contextlib.contextmanager
def progress_bar(
    context: Context,
    label: str,
    total: int | None = None,
    unit: Literal["items", "bytes"] = "items",
) -> Iterator[ProgressBar]:
    """A bar with count, rate and time left; nothing if nobody looks or programs read."""
    if context.is_json or not context.stderr.is_terminal:
        yield ProgressBar()
        return
    from tinkex.cli.progress_bars import make_progress_bars

    with make_progress_bars(context.stderr, unit) as progress:
        yield ProgressBar(progress, progress.add_task(label, total=total))


@contextlib.contextmanager
def paged_progress_bar(
    context: Context, label: str, unit: Literal["items", "bytes"] = "items"
) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how far a list is; a bar appears if one page was not all."""
    with contextlib.ExitStack() as stack:
        shown: list[ProgressBar] = []

        def told(done: int, total: int) -> None:
            if not shown and done < total:
                shown.append(stack.enter_context(progress_bar(context, label, total, unit)))
            if shown:
                shown[0].update(done, total)

        yield told
