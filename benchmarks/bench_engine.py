"""The engine against PEFT + transformers; `benchmarks.engine` does it, in a fresh process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import Row
from benchmarks.fresh_process import rows_of

#: What the server gives its worker too: threads that wait do not keep others from a core.
VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "TINKER_TELEMETRY": "0",
}


def main(options: Sequence[str] = ()) -> list[Row]:
    """Rows for the common table; everything else is printed and written to results.md."""
    return rows_of("benchmarks.engine", VARIABLES, options)


if __name__ == "__main__":
    from benchmarks.__main__ import print_table

    print_table(main(sys.argv[1:]))
