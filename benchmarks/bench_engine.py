"""The engine against PEFT + transformers; `benchmarks.engine` does it, in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import Row

#: What the server gives its worker too: threads that wait do not keep others from a core.
VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "TINKER_TELEMETRY": "0",
}


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table; everything else is printed and written to results.md."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", *options],
        env=os.environ | VARIABLES,
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"benchmarks.engine failed with {done.returncode}")
    text, _, last = done.stdout.rstrip().rpartition("\n")
    print(text)
    return [Row(*row) for row in json.loads(last)["rows"]]


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(sys.argv[1:]))
