"""How far a command is: bars for a person, lines for everybody, all on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import click

from tinkex.cli.context import Context, context_of
from tinkex.cli.format import wrapped

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


#: Where the context of a command keeps the line about what it waits for.
_WAITING = "tinkex.waiting"


def tell(text: str) -> None:
    """Say one line about what is being done; a program that reads JSON hears of errors alone."""
    context = _current()
    if context.is_json:
        return
    ctx = click.get_current_context(silent=True)
    shown: Waiting | None = None if ctx is None else ctx.meta.get(_WAITING)
    with contextlib.nullcontext() if shown is None else shown.paused():
        click.echo(wrapped(text, context.stderr), err=True)


def _current() -> Context:
    ctx = click.get_current_context(silent=True)
    return Context() if ctx is None else context_of(ctx)


class Waiting:
    """What a command waits for: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._context = _current()
        self._progress: Progress | None = None

    def show(self, text: str) -> None:
        """Wait for something else from now on."""
        if self._context.is_json or not self._context.stderr.is_terminal:
            tell(text)
            return
        from tinkex.cli.bars import make_waiting

        self.close()
        self._progress = make_waiting(self._context.stderr)
        self._progress.add_task(text, total=None)
        self._progress.start()
        # Lines that are printed meanwhile must not run into this one.
        if (ctx := click.get_current_context(silent=True)) is not None:
            ctx.meta[_WAITING] = self

    def tell(self, text: str) -> None:
        """Print a line; one that ends in dots is what the command waits for next."""
        if text.endswith("..."):
            self.show(text)
            return
        self.close()
        tell(text)

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
def waiting(text: str = "") -> Iterator[Waiting]:
    """A line about what is waited for, which disappears from a terminal at the end."""
    with contextlib.closing(Waiting()) as shown:
        if text:
            shown.show(text)
        yield shown


class Bar:
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
def bar(
    context: Context,
    label: str,
    total: int | None = None,
    unit: Literal["items", "bytes"] = "items",
) -> Iterator[Bar]:
    """A bar with count, rate and time left; nothing if nobody looks or programs read."""
    if context.is_json or not context.stderr.is_terminal:
        yield Bar()
        return
    from tinkex.cli.bars import make_progress

    with make_progress(context.stderr, unit) as progress:
        yield Bar(progress, progress.add_task(label, total=total))


@contextlib.contextmanager
def list_bar(
    context: Context, label: str, unit: Literal["items", "bytes"] = "items"
) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how far a list is; a bar appears if one page was not all."""
    with contextlib.ExitStack() as stack:
        shown: list[Bar] = []

        def told(done: int, total: int) -> None:
            if not shown and done < total:
                shown.append(stack.enter_context(bar(context, label, total, unit)))
            if shown:
                shown[0].update(done, total)

        yield told
