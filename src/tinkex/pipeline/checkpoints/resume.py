"""Resume from a checkpoint: choose it, compare its settings, restore the state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tinkex.errors import CheckpointError, InvalidInput
from tinkex.logs import get_logger
from tinkex.pipeline.checkpoints.step_directory import find_step_problem, latest_step, step_number
from tinkex.pipeline.checkpoints.step_files import StepContent, read_step
from tinkex.pipeline.optimizers import CombinedOptimizer
from tinkex.pipeline.stage_interface import Stage
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.train_state import TrainState, read_state, restore_rng
from tinkex.pipeline.weights import load_weights

AUTO = "auto"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTarget:
    """The objects that a checkpoint is loaded into."""

    model: nn.Module
    optimizer: CombinedOptimizer
    config: Mapping[str, object]
    """Settings of this run, compared with those of the checkpoint."""
    rank: int = 0
    allow_partial: bool = False


def choose_checkpoint(root: Path, resume: str | None) -> Path | None:
    """Return the checkpoint to resume from, with verified digests, or None for a new run.

    A damaged checkpoint is replaced by the newest valid one before it, with a warning.
    """
    if resume is None:
        _check_no_other_run(root)
        return None
    if resume == AUTO:
        return latest_step(root, verify_digests=True)
    path = Path(resume)
    step = step_number(path)
    if not path.is_dir() or step is None:
        raise InvalidInput(
            f"--resume {path} is not a step directory",
            hint="Pass a step_XXXXXXXX directory or auto.",
        )
    problem = find_step_problem(path, verify_digests=True)
    if problem is None:
        return path
    older = latest_step(path.parent, below=step, verify_digests=True)
    if older is None:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({problem}), and no valid one precedes it",
            hint="Start over without --resume.",
        )
    log.warning("checkpoint %s is damaged (%s); using %s instead", path, problem, older.name)
    return older


def is_rewind(root: Path, resume: str | None) -> bool:
    """Return True if `resume` names another step than the newest one."""
    if resume is None or resume == AUTO:
        return False
    newest = latest_step(root)
    return newest is not None and newest.resolve() != Path(resume).resolve()


def _check_no_other_run(root: Path) -> None:
    """Raise InvalidInput if the root contains steps of an earlier run.

    A new run would mix with them and prune its own steps, which have lower numbers.
    """
    old = latest_step(root)
    if old is not None:
        raise InvalidInput(
            f"{old} belongs to an earlier run",
            hint="Resume it with --resume auto, choose another --out_dir, or remove it.",
        )


def restore(path: Path, target: RestoreTarget) -> TrainState:
    """Restore weights, optimizer and RNG state from a checkpoint; returns its train state."""
    content = read_step(path)
    _check_config(path, content, target)
    difference = load_weights(target.model, content.weights, allow_partial=target.allow_partial)
    if difference:
        log.warning("%s is only partially loaded: %s", path, difference)
    else:
        _restore_optimizer(path, content, target)
    state = read_state(content.state)
    if target.rank < len(content.rng):
        restore_rng(content.rng[target.rank])
    else:
        log.warning(
            "%s has no RNG state for rank %d; the generators start from the seed", path, target.rank
        )
    return state


def _check_config(path: Path, content: StepContent, target: RestoreTarget) -> None:
    if content.config is None:
        log.warning("%s has no config.json, so its settings cannot be compared", path)
        return
    differences = find_mismatches(content.config, target.config)
    if differences and not target.allow_partial:
        raise InvalidInput(
            f"{path} was saved with different settings: {'; '.join(differences)}",
            hint="Use its settings, another --out_dir, or --allow_partial.",
        )
    for difference in differences:
        log.warning("%s was saved with a different setting: %s", path, difference)
    before, now = batches_per_update(content.config), batches_per_update(target.config)
    if before != now:
        log.warning(
            "%s was saved with %s batches per update over all ranks, now there are %s: "
            "the number of updates and their learning rates change",
            *(path, before, now),
        )


def _restore_optimizer(path: Path, content: StepContent, target: RestoreTarget) -> None:
    saved = content.optimizer.get("optimizer")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} has no optimizer state")
    try:
        target.optimizer.load_state_dict(saved)
    except CheckpointError as error:
        if not target.allow_partial:
            raise
        log.warning("the optimizer state is reset: %s", error)


#: Settings of the loop that affect the weights.
_LOOP_FIELDS = (
    "batch_size",
    "accumulation_steps",
    "learning_rate",
    "schedule",
    "optimizer",
    "weight_decay",
    "grad_clip",
    "seed",
    "dtype",
)
#: Settings that matter only if the learning rate depends on the total number of steps.
_COSINE_FIELDS = ("epochs", "max_steps", "final_learning_rate")


def describe_run(stage: Stage, settings: TrainSettings, world_size: int) -> dict[str, object]:
    """Return the content of config.json for a run."""
    names = list(_LOOP_FIELDS)
    if settings.schedule == "cosine":
        names += _COSINE_FIELDS
    if settings.optimizer == "muon":
        names.append("muon_lr")
    num_batches = stage.source.num_batches(0)
    loop = {name: getattr(settings, name) for name in names}
    described = {
        "stage": stage.name,
        "plan": {**loop, "warmup_steps": settings.resolve_warmup(num_batches, world_size)},
        "settings": {**stage.config, "num_batches": num_batches},
        "world_size": world_size,
    }
    plain: dict[str, object] = json.loads(json.dumps(described, default=str))
    return plain


def find_mismatches(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
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


def batches_per_update(config: Mapping[str, object]) -> int | None:
    """Return the number of micro-batches per update over all ranks, or None if unknown."""
    plan, world_size = config.get("plan"), config.get("world_size")
    steps = plan.get("accumulation_steps") if isinstance(plan, Mapping) else None
    if not isinstance(steps, int) or not isinstance(world_size, int):
        return None
    return steps * world_size


def _flatten(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            flat.update(_flatten(item, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = item
    return flat


def _format_value(values: Mapping[str, object], name: str) -> str:
    return json.dumps(values[name]) if name in values else "absent"
