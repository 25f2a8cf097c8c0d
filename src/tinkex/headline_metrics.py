"""The metrics that say how training goes, in the same order and with the same digits everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

#: In the order in which they are shown.
HEADLINE_METRICS = ("loss", "reward", "accuracy", "margin", "kl")
_EVAL_PREFIX = "eval_"
_LABELS = {"kl": "KL", "eval_kl": "Eval KL"}


def is_headline(name: str) -> bool:
    """Whether lists and pages show a metric of this name."""
    return name in HEADLINE_METRICS or name.startswith(_EVAL_PREFIX)


def select_headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are shown, in their order; those of evaluations come last."""
    own = {name: metrics[name] for name in HEADLINE_METRICS if name in metrics}
    measured = {name: value for name, value in metrics.items() if name.startswith(_EVAL_PREFIX)}
    return own | measured


def primary_metric(metrics: Mapping[str, float]) -> str:
    """The metric of a curve: the reward where there is one, else the loss."""
    return "reward" if "reward" in metrics else "loss"


def metric_label(name: str) -> str:
    """The heading of a metric: Loss, Reward, KL, Eval loss."""
    return _LABELS.get(name) or name.replace("_", " ").capitalize()


def format_metric(value: float | None, missing: str = "-") -> str:
    """A metric with enough digits to see it change."""
    if value is None or not isfinite(value):
        return missing if value is None else str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}"
