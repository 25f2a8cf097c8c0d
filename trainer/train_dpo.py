"""Train a model on preference pairs with DPO: `python trainer/train_dpo.py --help`."""

from __future__ import annotations

import sys

from tinkex.pipeline.entry import main

if __name__ == "__main__":
    sys.exit(main("dpo"))
