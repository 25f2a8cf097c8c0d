"""A benchmark that is a package of its own, run in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import Row


def rows_of(module: str, variables: Mapping[str, str], options: Sequence[str]) -> list[Row]:
    """Print what a module says; its last line is JSON, and holds its rows."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        env=os.environ | dict(variables),
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed with {done.returncode}")
    text, _, last = done.stdout.rstrip().rpartition("\n")
    print(text)
    return [Row(*row) for row in json.loads(last)["rows"]]
