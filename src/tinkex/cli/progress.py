"""Progress on stderr: bars and spinners on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import click

from tinkex.cli.context import Context, Screen, get_context
from tinkex.cli.format import wrap_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


#: Key in click's `ctx.meta` for the active spinner.
_SPINNER_KEY = "tinkex.waiting"


def print_status(text: str) -> None:
    """Print a status line to stderr; with JSON output, print nothing."""
    context = _current_context()
    if context.is_json:
        return
    ctx = click.get_current_context(silent=True)
    active: StatusSpinner | None = None if ctx is None else ctx.meta.get(_SPINNER_KEY)
    with contextlib.nullcontext() if active is None else active.paused():
        click.echo(wrap_text(text, context.stderr), err=True)


def _current_context() -> Context:
    ctx = click.get_current_context(silent=True)
    return Context() if ctx is None else get_context(ctx)


def stderr_console(screen: Screen) -> Console:
    """Return a console that updates stderr in place, with the properties of the screen."""
    from tinkex.progress_bar import make_terminal_console

    return make_terminal_console(sys.stderr, width=screen.width, is_colored=screen.is_colored)


class StatusSpinner:
    """The current wait state: one changing line on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._context = _current_context()
        self._progress: Progress | None = None

    def show(self, text: str) -> None:
        """Show a new text."""
        if self._context.is_json or not self._context.stderr.is_terminal:
            print_status(text)
            return
        from tinkex.progress_bar import make_spinner

        self.close()
        self._progress = make_spinner(stderr_console(self._context.stderr))
        self._progress.add_task(text, total=None)
        self._progress.start()
        # print_status() pauses the spinner while it prints.
        if (ctx := click.get_current_context(silent=True)) is not None:
            ctx.meta[_SPINNER_KEY] = self

    def print_line(self, text: str) -> None:
        """Print a line; a text that ends in `...` becomes the new spinner text."""
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
    """Show a spinner, and remove it from the terminal at the end."""
    with contextlib.closing(StatusSpinner()) as status:
        if text:
            status.show(text)
        yield status


class ProgressBar:
    """One progress bar; without a terminal it only counts."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress = progress
        self._task = task
        self.done = 0

    def update(self, done: int, total: int | None = None) -> None:
        """Set the completed amount, and the total if it is known."""
        self.done = done
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def advance(self, by: int = 1) -> None:
        """Add to the completed amount."""
        self.update(self.done + by)


@contextlib.contextmanager
def progress_bar(
    context: Context,
    label: str,
    total: int | None = None,
    unit: Literal["items", "bytes"] = "items",
) -> Iterator[ProgressBar]:
    """Show a bar with count, rate and time left; hidden without a terminal or with JSON."""
    if context.is_json or not context.stderr.is_terminal:
        yield ProgressBar()
        return
    from tinkex.progress_bar import make_progress_bars

    with make_progress_bars(stderr_console(context.stderr), unit) as progress:
        yield ProgressBar(progress, progress.add_task(label, total=total))


@contextlib.contextmanager
def paged_progress_bar(
    context: Context, label: str, unit: Literal["items", "bytes"] = "items"
) -> Iterator[Callable[[int, int], None]]:
    """Yield a progress callback for a paged list; the bar appears from the second page on."""
    with contextlib.ExitStack() as stack:
        bars: list[ProgressBar] = []

        def on_progress(done: int, total: int) -> None:
            if not bars and done < total:
                bars.append(stack.enter_context(progress_bar(context, label, total, unit)))
            if bars:
                bars[0].update(done, total)

        yield on_progress
