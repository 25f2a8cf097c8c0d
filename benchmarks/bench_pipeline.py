"""The pipeline against transformers' Trainer; `benchmarks.pipeline` does it, in a fresh process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import Row
from benchmarks.fresh_process import rows_of

#: Neither side asks a hub, or reports anywhere.
VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table; the proofs are printed before them."""
    return rows_of("benchmarks.pipeline", VARIABLES, options)


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(sys.argv[1:]))
