"""How long until a script can start: import time, what gets loaded, and `--help`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import SIDES, Row, at_most, medians, run_json

ROUNDS = 5
#: What a client that has done nothing yet should not have loaded.
HEAVY = ("torch", "numpy", "transformers", "pydantic", "rich", "httpx", "anyio", "aiohttp")
#: The package alone, and the package with its client classes: ours come when first used.
IMPORTS = {
    "import": "import {package}",
    "import and name ServiceClient": "import {package}; {package}.ServiceClient",
}
PROBE = """
import json, sys, time
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
heavy = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps({{"ms": 1000 * seconds, "modules": len(sys.modules), "heavy": heavy}}))
"""


def main() -> list[Row]:
    """Rows for import and command line; targets hold with torch installed."""
    rows = []
    for name, statement in IMPORTS.items():
        runs = measure(statement)
        ours, official = medians(runs["ours"]), medians(runs["official"])
        limit = 0.05 if name == "import" else None
        rows.append(at_most(name, ours["ms"], official["ms"], "ms", limit))
        num_ours, num_official = (len(runs[side][0]["heavy"]) for side in SIDES)
        listed = ", ".join(runs["official"][0]["heavy"])
        rows.append(
            Row(
                f"  heavy modules loaded ({listed or 'none'})",
                ", ".join(runs["ours"][0]["heavy"]) or "none",
                f"{num_official}",
                num_ours / max(1, num_official),
                "<= 0",
                num_ours == 0,
            )
        )
    return [*rows, help_row()]


def measure(statement: str) -> dict[str, list[dict[str, Any]]]:
    """Several runs of both sides, in turn: a slow minute of the machine hits both."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, package in SIDES.items():
            probe = PROBE.format(statement=statement.format(package=package), heavy=HEAVY)
            runs[side].append(run_json([sys.executable, "-c", probe]))
    return runs


def help_row() -> Row:
    """From the shell's point of view: the whole process of `--help`."""
    folder = Path(sys.executable).parent
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, package in SIDES.items():
            started = time.perf_counter()
            subprocess.run([str(folder / package), "--help"], capture_output=True, check=True)
            seconds[side].append(time.perf_counter() - started)
    ours, official = (1000 * median(seconds[side]) for side in SIDES)
    return at_most("cold start of --help", ours, official, "ms", 0.1)


if __name__ == "__main__":
    for row in main():
        print(*row, sep=" | ")
