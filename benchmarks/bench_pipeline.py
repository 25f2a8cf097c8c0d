"""The pipeline against transformers' Trainer; `benchmarks.pipeline` does it, in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import Row

#: Neither side asks a hub, or reports anywhere.
VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table; the proofs are printed before them."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pipeline", *options],
        env=os.environ | VARIABLES,
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"benchmarks.pipeline failed with {done.returncode}")
    text, _, last = done.stdout.rstrip().rpartition("\n")
    print(text)
    return [Row(*row) for row in json.loads(last)["rows"]]


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(sys.argv[1:]))
