"""What must be the same when a run goes on from a checkpoint, and how it differs when it is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinkex.pipeline.stage_interface import Stage, TrainPlan

#: Settings of a plan that change what is learned.
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
#: Settings that matter only where the learning rate depends on how far the end is.
_COSINE_FIELDS = ("epochs", "max_steps", "final_learning_rate")


def describe_run(stage: Stage, plan: TrainPlan, world_size: int) -> dict[str, Any]:
    """What config.json says of a run, as plain JSON."""
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
    """Each setting that differs, as `name: saved -> current`.

    With another number of ranks the share of each and the length of the warm-up may be others.
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
    """How many micro-batches of all ranks make an update; None if it is not said."""
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
