"""Train a base model on plain text: `python trainer/train_pretrain.py --help`."""

from __future__ import annotations

import sys

from tinkex.pipeline.entry import main

if __name__ == "__main__":
    sys.exit(main("pretrain"))
