"""Train a model to reason before it answers: `python trainer/train_distill_reason.py --help`."""

from __future__ import annotations

import sys

from tinkex.pipeline.entry import main

if __name__ == "__main__":
    sys.exit(main("r1"))
