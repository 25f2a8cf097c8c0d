"""Measure the engine: `python -m benchmarks.engine [--quick] [--only name ...]`.

Prints the results; the last line is JSON for the calling program.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from transformers.utils import logging as transformers_log

from benchmarks.engine import report
from benchmarks.engine.figures import Figure, log_progress
from benchmarks.engine.memory import measure_memory
from benchmarks.engine.sampling import (
    measure_arrivals,
    measure_batch,
    measure_group,
    measure_single,
)
from benchmarks.engine.scaling import Slope, measure_growth
from benchmarks.engine.serving import measure_serving, measure_snapshots
from benchmarks.engine.shapes import LARGE, QUICK, SMALL, THREADS, WIDE, Shape
from benchmarks.engine.stage import Stage, stage
from benchmarks.engine.training import measure_adapters, measure_sft

#: Measurements that need a loaded model, by their `--only` names.
ON_STAGE: dict[str, Callable[[Stage], Sequence[Figure]]] = {
    "sft": lambda loaded: [measure_sft(loaded)],
    "adapters": lambda loaded: [measure_adapters(loaded)],
    "single": lambda loaded: [measure_single(loaded)],
    "batch": lambda loaded: [measure_batch(loaded)],
    "arrivals": lambda loaded: [measure_arrivals(loaded)],
    "group": lambda loaded: [measure_group(loaded)],
    "server": measure_serving,
    "snapshots": measure_snapshots,
}
NAMES = (*ON_STAGE, "memory", "growth")
GROUPS = {
    "training": ("sft", "adapters"),
    "sampling": ("single", "batch", "arrivals", "group"),
}


def main() -> int:
    """Measure and print; writes the results file if everything was measured."""
    options = _options()
    torch.set_num_threads(THREADS)
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    started = time.monotonic()
    names = {name for each in options.only or NAMES for name in GROUPS.get(each, (each,))}
    every = [QUICK] if options.quick else [SMALL, LARGE]
    shapes = [shape for shape in every if options.model in (None, shape.name)]
    figures = [*_measure_stages(shapes, names), *_measure_memory(shapes, names)]
    slopes = _measure_slopes(names, is_quick=options.quick)
    text = report.write(figures, slopes, shapes, time.monotonic() - started)
    print(text)
    if len(names) == len(NAMES) and shapes == [SMALL, LARGE]:
        report.RESULTS_FILE.write_text(text)
    print(json.dumps({"rows": [figure.row for figure in figures]}))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model, fewer repeats")
    parser.add_argument(
        "--only", nargs="+", choices=(*NAMES, *GROUPS), default=[], help="measure only these"
    )
    parser.add_argument("--model", choices=(SMALL.name, LARGE.name), help="measure only this model")
    return parser.parse_args()


def _measure_stages(shapes: Sequence[Shape], names: Collection[str]) -> Iterator[Figure]:
    selected = [name for name in ON_STAGE if name in names]
    for shape in shapes if selected else ():
        with stage(shape) as loaded:
            for name in selected:
                started = time.monotonic()
                results = ON_STAGE[name](loaded)
                _log_progress(name, shape, started, results)
                yield from results


def _measure_memory(shapes: Sequence[Shape], names: Collection[str]) -> Iterator[Figure]:
    for shape in shapes if "memory" in names else ():
        started = time.monotonic()
        results = measure_memory(WIDE if shape.name == WIDE.name else shape)
        _log_progress("memory", shape, started, [results])
        yield results


def _measure_slopes(names: Collection[str], *, is_quick: bool) -> list[Slope]:
    if "growth" not in names:
        return []
    started = time.monotonic()
    results = measure_growth(SMALL, is_quick=is_quick)
    _log_progress("growth", SMALL, started, [])
    return results


def _log_progress(name: str, shape: Shape, started: float, results: Sequence[Figure]) -> None:
    log_progress(f"  {name} on {shape.name}: {time.monotonic() - started:.0f} s")
    for figure in results:
        row = figure.row
        verdict = f"{row.ours} : {row.official} = {row.ratio:.2f} ({row.target})"
        log_progress(f"    {figure.name}: {verdict}; {figure.proof}")


if __name__ == "__main__":
    sys.exit(main())
