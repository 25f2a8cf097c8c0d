"""Run every benchmark and print one table: `python -m benchmarks [name ...]`.

`python -m benchmarks engine --quick --only sampling` hands what follows `engine` to that benchmark;
`cluster`, `fairness`, `groups`, `hostile`, `inference`, `limits`, `parallel`, `peers`,
`pipeline` and `store` take options too.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from os import cpu_count
from pathlib import Path
from statistics import median

from benchmarks import (
    Row,
    at_most,
    bench_cluster,
    bench_codec,
    bench_engine,
    bench_fairness,
    bench_groups,
    bench_hostile,
    bench_inference,
    bench_limits,
    bench_parallel,
    bench_peers,
    bench_pipeline,
    bench_store,
)

NAMES = sorted(
    path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
)
CODEC_ROUNDS = 10
#: Benchmarks that take options of their own.
WITH_OPTIONS = {
    "cluster": bench_cluster.main,
    "engine": bench_engine.main,
    "fairness": bench_fairness.main,
    "groups": bench_groups.main,
    "hostile": bench_hostile.main,
    "inference": bench_inference.main,
    "limits": bench_limits.main,
    "parallel": bench_parallel.main,
    "peers": bench_peers.main,
    "pipeline": bench_pipeline.main,
    "store": bench_store.main,
}
HEADINGS = ("benchmark", "ours", "other", "ratio", "target", "met")


def main() -> int:
    """Print the table; figures inform, so a missed target is shown and not an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}")
    options, rest = parser.parse_known_args()
    names = options.names or NAMES
    if rest and (len(names) != 1 or names[0] not in WITH_OPTIONS):
        known = " or ".join(map(repr, WITH_OPTIONS))
        parser.error(f"{rest[0]} is an option of the benchmark {known}; name it first, and alone")
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    print(f"Python {platform.python_version()}, {cpu_count()} cores; ratio = ours / other\n")
    table: list[Row] = []
    for name in names:
        started = time.monotonic()
        print(f"running {name} ...", flush=True, file=sys.stderr)
        table += rows_of(name, rest)
        print(f"{name} took {time.monotonic() - started:.0f} s", file=sys.stderr)
    print_table(table)
    return 0


def rows_of(name: str, options: Sequence[str]) -> list[Row]:
    """What one benchmark measured."""
    if name == "codec":
        return codec_rows()
    if name in WITH_OPTIONS:
        return WITH_OPTIONS[name](options)
    return [Row(*row) for row in importlib.import_module(f"benchmarks.bench_{name}").main()]


def codec_rows() -> list[Row]:
    """The cases of bench_codec, whose own table has more: times instead of speeds, so less wins."""
    official, ours = (bench_codec.Worker(package) for package in ("official", "tinkex"))
    rows = []
    for case in official.num_bytes:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(bench_codec.NUM_TURNS):
            times[0].extend(ours.measure(case, CODEC_ROUNDS))
            times[1].extend(official.measure(case, CODEC_ROUNDS))
        limit = 1.0 / bench_codec.TARGET_RATIO if case == bench_codec.MAIN_CASE else None
        mine, theirs = (1000.0 * median(each) for each in times)
        rows.append(at_most(f"codec: {case}", mine, theirs, "ms", limit))
    official.close()
    ours.close()
    return rows


def print_table(table: Iterable[Row]) -> None:
    """Columns as wide as what is in them."""
    lines = [HEADINGS, *map(cells, table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        name, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print(name, *others, sep="   ")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text; a benchmark without a promise has no verdict."""
    met = "" if row.met is None else ("yes" if row.met else "NO")
    return (row.name, str(row.ours), str(row.official), f"{row.ratio:.3f}", str(row.target), met)


if __name__ == "__main__":
    sys.exit(main())
