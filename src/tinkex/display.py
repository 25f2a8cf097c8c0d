"""Numbers as text: sizes, counts and metrics, and which metrics are shown first."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

#: In display order.
HEADLINE_METRICS = ("loss", "reward", "accuracy", "margin", "kl")
_EVAL_PREFIX = "eval_"
_LABELS = {"kl": "KL", "eval_kl": "Eval KL"}


def is_headline(name: str) -> bool:
    """Whether lists and pages show a metric with this name."""
    return name in HEADLINE_METRICS or name.startswith(_EVAL_PREFIX)


def select_headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics to show, in display order; evaluation metrics come last."""
    training = {name: metrics[name] for name in HEADLINE_METRICS if name in metrics}
    evaluation = {name: value for name, value in metrics.items() if name.startswith(_EVAL_PREFIX)}
    return training | evaluation


def primary_metric(metrics: Mapping[str, float]) -> str:
    """The metric to plot: the reward if it is reported, otherwise the loss."""
    return "reward" if "reward" in metrics else "loss"


def metric_label(name: str) -> str:
    """The column heading of a metric: Loss, Reward, KL, Eval loss."""
    return _LABELS.get(name) or name.replace("_", " ").capitalize()


def format_metric(value: float | None, missing: str = "-") -> str:
    """Format a metric with enough digits to see it change."""
    if value is None or not isfinite(value):
        return missing if value is None else str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}"


#: A kB has 1,000 bytes.
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB")


def format_bytes(num_bytes: float) -> str:
    """Format a size in its largest unit: 512 B, 1.5 kB, 184 MB."""
    amount, unit = float(num_bytes), 0
    while amount >= 999.5 and unit < len(_SIZES) - 1:
        amount, unit = amount / 1000, unit + 1
    digits = 0 if unit == 0 or amount >= 99.95 else 1
    return f"{amount:,.{digits}f} {_SIZES[unit]}"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: 1 run, 2 runs, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_parameters(number: int | None) -> str | None:
    """Format a number of parameters: 1.1B, 135M."""
    if number is None:
        return None
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
