"""Compare the settings of a checkpoint with those of the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinkex.pipeline.stage_interface import Stage, TrainPlan

#: Settings of a plan that affect the weights.
_PLAN_FIELDS = (
    "batch_size",
    "accumulation_steps",
    "learning_rate",
    "warmup_steps",
    "schedule",
    "optimizer",
    "weight_decay",
    "grad_clip",
    "seed",
    "dtype",
)
#: Settings that matter only if the learning rate depends on the total number of steps.
_COSINE_FIELDS = ("epochs", "max_steps", "final_learning_rate")


def describe_run(stage: Stage, plan: TrainPlan, world_size: int) -> dict[str, Any]:
    """Return the content of config.json for a run."""
    names = list(_PLAN_FIELDS)
    if plan.schedule == "cosine":
        names += _COSINE_FIELDS
    if plan.optimizer == "muon":
        names.append("muon_lr")
    described = {
        "stage": stage.name,
        "plan": {name: getattr(plan, name) for name in names},
        "settings": {**stage.config, "num_batches": stage.source.num_batches(0)},
        "world_size": world_size,
    }
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return plain


def find_mismatches(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return each setting that differs, as `name: saved -> current`.

    With a different world size, accumulation and warmup steps may differ too.
    """
    before, now = _flatten(saved), _flatten(current)
    ignored = {"world_size"}
    if before.get("world_size") != now.get("world_size"):
        ignored |= {"plan.accumulation_steps", "plan.warmup_steps"}
    names = sorted({*before, *now} - ignored)
    return [
        f"{name}: {_format_value(before, name)} -> {_format_value(now, name)}"
        for name in names
        if not name.startswith("versions.")
        and _format_value(before, name) != _format_value(now, name)
    ]


def batches_per_update(config: Mapping[str, Any]) -> int | None:
    """Return the number of micro-batches per update over all ranks, or None if unknown."""
    try:
        return int(config["plan"]["accumulation_steps"]) * int(config["world_size"])
    except (KeyError, TypeError, ValueError):
        return None


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            flat.update(_flatten(item, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = item
    return flat


def _format_value(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "absent"
