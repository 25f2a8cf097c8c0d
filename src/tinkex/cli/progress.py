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


def tell(text: str) -> None:
    """Say one line about what is being done; a program that reads JSON hears of errors alone."""
    ctx = click.get_current_context(silent=True)
    context = Context() if ctx is None else context_of(ctx)
    if not context.is_json:
        click.echo(wrapped(text, context.stderr), err=True)


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
def list_bar(context: Context, label: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how far a list is; a bar appears if one page was not all."""
    with contextlib.ExitStack() as stack:
        shown: list[Bar] = []

        def told(done: int, total: int) -> None:
            if not shown and done < total:
                shown.append(stack.enter_context(bar(context, label, total)))
            if shown:
                shown[0].update(done, total)

        yield told
