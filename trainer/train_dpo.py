"""Teach a model which of two answers people prefer: `python trainer/train_dpo.py --help`."""

from __future__ import annotations

import sys

from tinkex.pipeline.entry import main

if __name__ == "__main__":
    sys.exit(main("dpo"))
