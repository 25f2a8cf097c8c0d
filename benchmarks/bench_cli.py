"""How long the command line takes to answer: help and version, beside an empty Python."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks import Row, at_most
from tinkex.cli.main import main as command_line

ROUNDS = 7
LOOKS = 3
FOLDER = Path(sys.executable).parent
#: At most so many times an empty Python, and so much of the official command line.
EMPTY_LIMIT, OFFICIAL_LIMIT = 6.0, 0.05


def main() -> list[Row]:
    """Rows for `--help`, `version` and the slowest help of all commands."""
    ours = str(FOLDER / "tinkex")
    rows = []
    for words in (["--help"], ["version"]):
        mine, empty, official = _medians([ours, *words], _empty(), [str(FOLDER / "tinker"), *words])
        name = f"tinkex {' '.join(words)}"
        rows.append(at_most(f"{name} : python -c pass", mine, empty, "ms", EMPTY_LIMIT))
        rows.append(at_most(f"{name} : tinker {words[0]}", mine, official, "ms", OFFICIAL_LIMIT))
    return [*rows, _slowest_help(ours)]


def _slowest_help(ours: str) -> Row:
    """A few looks at each, then the slowest of them measured like the others."""
    context = click.Context(command_line, info_name="tinkex")
    every = list(_commands(command_line, context, []))
    # The least of a few: one look alone would find whoever was disturbed.
    least = {
        tuple(words): min(_seconds([ours, *words, "--help"]) for _ in range(LOOKS))
        for words in every
    }
    slowest = max(least, key=lambda words: least[words])
    mine, empty = _medians([ours, *slowest, "--help"], _empty())
    name = f"slowest of {len(every)} helps, {' '.join(slowest)} : python -c pass"
    return at_most(name, mine, empty, "ms", EMPTY_LIMIT)


def _commands(
    command: click.Command, context: click.Context, words: list[str]
) -> Iterator[list[str]]:
    yield words
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None:
                inner = click.Context(found, info_name=name, parent=context)
                yield from _commands(found, inner, [*words, name])


def _medians(*commands: Sequence[str]) -> list[float]:
    """Milliseconds of each, taken in turn."""
    times: list[list[float]] = [[] for _ in commands]
    for _ in range(ROUNDS):
        for found, command in zip(times, commands, strict=True):
            found.append(1000.0 * _seconds(command))
    return [median(found) for found in times]


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


def _empty() -> list[str]:
    return [sys.executable, "-c", "pass"]


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main())
