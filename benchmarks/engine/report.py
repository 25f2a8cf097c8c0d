"""Results as Markdown, for the terminal and the results file."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from os import cpu_count, environ
from pathlib import Path

from benchmarks.engine.figures import Figure
from benchmarks.engine.scaling import Slope
from benchmarks.engine.shapes import RANK, THREADS, Shape

RESULTS_FILE = Path(__file__).parent.parent / "results.md"
_PACKAGES = ("tinkex", "torch", "transformers", "peft", "safetensors", "numpy")
_HEADINGS = ("figure", "model", "ours", "baseline", "ratio", "limit", "ok", "baseline's spread")


def write(
    figures: Sequence[Figure], slopes: Sequence[Slope], shapes: Sequence[Shape], seconds: float
) -> str:
    """Build the report."""
    parts = [
        "# The engine against PEFT + transformers",
        "Written by `make bench`; do not edit. Ratios are ours to the baseline's in one run, with "
        "the same model, weights, data and threads; the baseline is measured before and after "
        "ours. `benchmarks/README.md` describes each figure.",
        _table(_HEADINGS, map(_figure_cells, figures)),
        "## Growth",
        _table(("what", "measured", "limit", "ok", "points"), map(_slope_cells, slopes)),
        "## Proof that both sides did the same work",
        "\n".join(f"- {_full_name(each)}: {each.proof}" for each in figures if each.proof),
        "## Environment",
        "\n".join(f"- {line}" for line in _conditions(shapes, seconds)),
    ]
    return "\n\n".join(parts) + "\n"


def _conditions(shapes: Sequence[Shape], seconds: float) -> list[str]:
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return [
        f"{platform.system()}, {_processor()}, {cpu_count()} cores, no GPU",
        f"Python {platform.python_version()}, {versions}",
        f"{THREADS} threads on both sides, GOMP_SPINCOUNT={environ.get('GOMP_SPINCOUNT', '')}, "
        "float32",
        f"LoRA of rank {RANK} on q, k, v, o, gate, up, down and lm_head, trained on both sides",
        *(f"{shape.name}: {shape.about}; random weights" for shape in shapes),
        f"the whole run took {seconds / 60:.1f} minutes",
    ]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _full_name(figure: Figure) -> str:
    return f"{figure.name}, {figure.model}"


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    row = figure.row
    spread = "" if figure.spread is None else f"{figure.spread:.0%}"
    ok = _verdict(row.met)
    return (
        *(figure.name, figure.model, row.ours, row.official),
        *(f"{row.ratio:.2f}", row.target, ok, spread),
    )


def _slope_cells(slope: Slope) -> tuple[str, ...]:
    return (slope.name, slope.measured, slope.limit, _verdict(slope.is_met), slope.points)


def _verdict(is_met: bool | None) -> str:
    return "" if is_met is None else ("ok" if is_met else "**not**")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
