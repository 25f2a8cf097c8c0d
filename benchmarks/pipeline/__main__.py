"""Measure the pipeline: `python -m benchmarks.pipeline [--quick] [--only name ...]`.

Prints evidence that both sides did the same work; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging as transformers_log

from benchmarks import Row
from benchmarks.engine.figures import Figure, log_progress
from benchmarks.pipeline.precision import measure_precision
from benchmarks.pipeline.saving import measure_saving
from benchmarks.pipeline.speed import measure_packing, measure_pretrain
from benchmarks.pipeline.workload import Workload

THREADS = 2
MEASURES: dict[str, Callable[[Workload, bool], Sequence[Figure]]] = {
    "pretrain": measure_pretrain,
    "packing": measure_packing,
    "saving": measure_saving,
}
NAMES = (*MEASURES, "precision")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="name")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    warnings.simplefilter("ignore")
    with TemporaryDirectory(prefix="tinkex-bench-") as folder:
        rows = _measure(Workload(Path(folder)), options.only, options.quick)
    if "precision" in options.only:
        rows.append(measure_precision())
    print(json.dumps({"rows": rows}))
    return 0


def _measure(workload: Workload, names: Sequence[str], is_quick: bool) -> list[Row]:
    rows = []
    for name, measure in MEASURES.items():
        if name not in names:
            continue
        started = time.monotonic()
        for figure in measure(workload, is_quick):
            row = figure.row
            rows.append(row)
            result = f"{row.ours} : {row.official} = {row.ratio:.3f} {row.target}"
            print(f"{row.name}: {result}; {figure.proof}", flush=True)
        log_progress(f"  {name}: {time.monotonic() - started:.0f} s")
    return rows


if __name__ == "__main__":
    sys.exit(main())
