"""The metrics shown in lists, pages and progress lines: selection, order, labels and digits."""

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
