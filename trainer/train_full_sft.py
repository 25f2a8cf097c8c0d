"""Fine-tune a base model on conversations: `python trainer/train_full_sft.py --help`."""

from __future__ import annotations

import sys

from tinkex.pipeline.entry import main

if __name__ == "__main__":
    sys.exit(main("sft"))
