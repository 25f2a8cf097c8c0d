"""Going on from a checkpoint: which one, whether it fits, and everything put back in place."""

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
    """What a checkpoint is put into."""

    model: nn.Module
    optimizer: CombinedOptimizer
    config: Mapping[str, Any]
    """What this run is, to be compared with what the checkpoint was."""
    rank: int = 0
    allow_partial: bool = False


def choose_checkpoint(root: Path, resume: Path | str | None) -> Path | None:
    """The checkpoint to go on from, every byte of it checked, or None to begin anew.

    A damaged one is passed over for the newest good one below it, with a warning that says why.
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
            f"--resume {path} is no step directory", hint="Give a step_XXXXXXXX directory or auto."
        )
    problem = find_step_problem(path, verify_digests=True)
    if problem is None:
        return path
    older = latest_step(path.parent, below=step, verify_digests=True)
    if older is None:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({problem}), and there is no good one before it",
            hint="Start again without --resume.",
        )
    log.warning("checkpoint %s is damaged (%s), so %s is used instead", path, problem, older.name)
    return older


def is_rewind(root: Path, resume: Path | str | None) -> bool:
    """Whether somebody asked for another step than the newest one: a run that goes back."""
    if resume is None or resume == AUTO:
        return False
    newest = latest_step(root)
    return newest is not None and newest.resolve() != Path(resume).resolve()


def _check_no_other_run(root: Path) -> None:
    """A new run would prune its own steps, whose numbers are lower, and mix with the old ones."""
    old = latest_step(root)
    if old is not None:
        raise InvalidInput(
            f"{old} is of an earlier run, which a new one would mix with",
            hint="Go on from it with --resume auto, give another --out_dir, or remove it.",
        )


def restore(path: Path, target: RestoreTarget) -> TrainState:
    """Put a checkpoint's weights, optimizer and generators in place; returns its state."""
    content = read_step(path)
    _check_config(path, content, target)
    difference = load_weights(target.model, content.weights, allow_partial=target.allow_partial)
    if difference:
        log.warning("%s is loaded in part: %s", path, difference)
    else:
        _restore_optimizer(path, content, target)
    state = read_state(content.state)
    if target.rank < len(content.rng):
        restore_rng(content.rng[target.rank])
    else:
        log.warning("%s has no generators for rank %d: they start anew", path, target.rank)
    return state


def _check_config(path: Path, content: StepContent, target: RestoreTarget) -> None:
    if content.config is None:
        log.warning("%s does not say how it was made, so nothing can be compared", path)
        return
    differences = find_mismatches(content.config, target.config)
    if differences and not target.allow_partial:
        raise InvalidInput(
            f"{path} was made with other settings: {'; '.join(differences)}",
            hint="Use the settings it was made with, another --out_dir, or --allow_partial.",
        )
    for difference in differences:
        log.warning("%s was made with another setting: %s", path, difference)
    before, now = batches_per_update(content.config), batches_per_update(target.config)
    if before != now:
        log.warning(
            "%s was made with %s batches per update over all ranks, and now there are %s: "
            "the number of updates and the learning rate of each change",
            *(path, before, now),
        )


def _restore_optimizer(path: Path, content: StepContent, target: RestoreTarget) -> None:
    saved = content.optimizer.get("optimizer")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} has no state of an optimizer")
    try:
        target.optimizer.load_state_dict(saved)
    except CheckpointError as error:
        if not target.allow_partial:
            raise
        log.warning("the optimizer starts anew: %s", error)
