"""Resume from a checkpoint: choose it, check its settings, restore the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tinkex.errors import CheckpointError, InvalidInput
from tinkex.logs import get_logger
from tinkex.pipeline.checkpoints.config_mismatch import batches_per_update, find_mismatches
from tinkex.pipeline.checkpoints.step_directory import find_step_problem, latest_step, step_number
from tinkex.pipeline.checkpoints.step_files import StepContent, read_step
from tinkex.pipeline.optimizers import CombinedOptimizer
from tinkex.pipeline.train_state import TrainState, read_state, restore_rng
from tinkex.pipeline.weights import load_weights

AUTO = "auto"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTarget:
    """The objects that a checkpoint is loaded into."""

    model: nn.Module
    optimizer: CombinedOptimizer
    config: Mapping[str, Any]
    """Settings of this run, compared with those of the checkpoint."""
    rank: int = 0
    allow_partial: bool = False


def choose_checkpoint(root: Path, resume: Path | str | None) -> Path | None:
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


def is_rewind(root: Path, resume: Path | str | None) -> bool:
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
