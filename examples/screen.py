"""Output of the demo: colours and a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

BLOCKS = "▁▂▃▄▅▆▇█"
#: Number of progress lines without a terminal.
NUM_LINES = 10

console = Console(stderr=True, highlight=False, emoji=False)
#: Called after a step with its number, the loss and tokens per second.
Report = Callable[[int, float, float], None]


def opening(text: str, more: str) -> None:
    if not console.is_terminal:
        console.print(f"{text}\n{more}", soft_wrap=True)
        return
    panel = Panel(
        f"[bold]{escape(text)}[/]\n[dim]{escape(more)}[/]", box=box.ROUNDED, border_style="cyan"
    )
    console.print(panel)


def title(number: int, text: str) -> None:
    console.print(f"\n[bold cyan]{number}[/] [bold]{escape(text)}[/]")


def say(text: str) -> None:
    if console.is_terminal:
        console.print(Padding(escape(text), (0, 0, 0, 2)))
    else:
        # Without a terminal, do not wrap lines.
        console.print(f"  {escape(text)}", soft_wrap=True)


def say_command(words: Sequence[str]) -> None:
    console.print(f"  [dim]$[/] [yellow]{escape(' '.join(words))}[/]", soft_wrap=True)


def output(text: str) -> None:
    """Print the output of a command unchanged."""
    for line in text.rstrip().splitlines():
        console.print(f"  {escape(line)}", soft_wrap=True)


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show that something is running, then print how long it took."""
    started = time.monotonic()
    with console.status(f"  {escape(text)} ..."):
        yield
    say(f"{text}: {time.monotonic() - started:.1f} s")


def answers(asked: Sequence[str], columns: dict[str, Sequence[str]], mark: str) -> None:
    """Print questions and answers; highlight answers that contain the mark."""
    if not console.is_terminal:
        for at, question in enumerate(asked):
            say(question)
            for name, column in columns.items():
                say(f"  {name}: {column[at]}")
        return
    widths = [Column(name.capitalize(), ratio=3, overflow="fold") for name in columns]
    table = Table(Column("Question", ratio=2), *widths, box=box.ROUNDED, expand=True)
    for at, question in enumerate(asked):
        texts = [column[at] for column in columns.values()]
        cells = [
            f"[{'green' if mark in text.lower() else 'default'}]{escape(text)}[/]" for text in texts
        ]
        table.add_row(escape(question), *cells, end_section=True)
    console.print(Padding(table, (0, 0, 0, 2)))


@contextlib.contextmanager
def training_bar(num_steps: int) -> Iterator[Report]:
    """Yield a function that shows each step."""
    if not console.is_terminal:
        every = max(1, num_steps // NUM_LINES)

        def line(step: int, loss: float, rate: float) -> None:
            if step % every == 0 or step in (1, num_steps):
                say(f"step {step}/{num_steps}  loss {loss:.3f}  {rate:.0f} tokens/s")

        yield line
        return
    columns = (
        SpinnerColumn(),
        TextColumn("step {task.completed:>3}/{task.total}"),
        BarColumn(24),
        TextColumn("loss [bold]{task.fields[loss]:>6}[/] [green]{task.fields[curve]}[/]"),
        TextColumn("[dim]{task.fields[rate]:.0f} tokens/s[/]"),
        TimeRemainingColumn(),
    )
    losses: list[float] = []
    with Progress(*columns, console=console) as progress:
        shown = progress.add_task("", total=num_steps, loss="...", curve="", rate=0.0)

        def bar(step: int, loss: float, rate: float) -> None:
            losses.append(loss)
            progress.update(
                shown, completed=step, loss=f"{loss:.3f}", curve=curve(losses), rate=rate
            )

        yield bar


def curve(values: Sequence[float], width: int = 24) -> str:
    """Return the values as a sparkline, the newest on the right."""
    shown = values[:: -(-len(values) // width)]
    top = max(shown) or 1.0
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * value / top)] for value in shown)


def closing(text: str, lines: Sequence[tuple[str, str]]) -> None:
    """Print the final message and the commands to run next."""
    console.print(f"\n[bold green]{escape(text)}[/]", soft_wrap=True)
    for what, command in lines:
        console.print(f"  {escape(what)}\n    [yellow]{escape(command)}[/]", soft_wrap=True)


def failed(text: str, hint: str | None) -> None:
    console.print(f"\n[red]{escape(text)}[/]", soft_wrap=True)
    if hint:
        say(hint)
