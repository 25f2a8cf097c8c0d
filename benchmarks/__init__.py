"""Benchmarks against the official SDK: every figure is a ratio within one run.

This file holds what they share: the row of a table, and how two sides are measured in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

SIDES = {"ours": "tinkex", "official": "tinker"}
API_KEY = "tml-benchmark"
#: What the server with fixed responses responds to.
BASE_MODEL = "tinkex/bigram"
NUM_SAMPLED_TOKENS = 8
NUM_TRAINED_TOKENS = 2048


class Row(NamedTuple):
    """One line of the table; `met` is None where nothing was promised."""

    name: str
    ours: str
    official: str
    ratio: float
    target: str = ""
    met: bool | None = None


def at_most(name: str, ours: float, official: float, unit: str, limit: float | None = None) -> Row:
    """A row where less is better."""
    ratio = ours / official
    if limit is None:
        return Row(name, _shown(ours, unit), _shown(official, unit), ratio)
    text, is_met = f"<= {limit:.3g}", ratio <= limit
    return Row(name, _shown(ours, unit), _shown(official, unit), ratio, text, is_met)


def at_least(name: str, ours: float, official: float, unit: str, limit: float | None = None) -> Row:
    """A row where more is better."""
    row = at_most(name, ours, official, unit)
    if limit is None:
        return row
    return row._replace(target=f">= {limit:g}", met=row.ratio >= limit)


def _shown(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
    return f"{number} {unit}"


def run_json(command: Sequence[str], **changes: str) -> dict[str, Any]:
    """Run a process that prints a JSON object as its last line."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"} | changes
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_module(module: str, package: str, **changes: str) -> dict[str, Any]:
    """Run one side of a benchmark: `python -m benchmarks.module package`."""
    return run_json([sys.executable, "-m", f"benchmarks.{module}", package], **changes)


@contextmanager
def server() -> Iterator[str]:
    """A server with fixed responses, in another process: only the client is measured."""
    command = [sys.executable, "-m", "benchmarks.canned_server"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def run_against_server(module: str, package: str) -> dict[str, Any]:
    """One side of a benchmark against a fresh server: the other side's leftovers do not count."""
    with server() as url:
        return run_module(module, package, TINKER_BASE_URL=url, TINKER_API_KEY=API_KEY)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median of every number over several runs of one side."""
    return {
        name: median(run[name] for run in runs)
        for name, value in runs[0].items()
        if isinstance(value, int | float)
    }
