"""Step checkpoints for any training script: atomic saves, strict loading.

The files of a step are described in tinkex.pipeline.checkpoints.step_directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch  # noqa: TID253

from tinkex.checkpoint.retention import StepRetention
from tinkex.errors import CheckpointError
from tinkex.pipeline.checkpoints.step_directory import (
    find_step_problem,
    is_valid_step,
    latest_step,
    prune_steps,
    remove_interrupted_saves,
)
from tinkex.pipeline.checkpoints.step_files import StepContent, read_step, write_step
from tinkex.pipeline.train_state import capture_rng, restore_rng
from tinkex.pipeline.weights import load_weights, named_weights

__all__ = [
    "is_valid_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "prune_checkpoints",
    "save_checkpoint",
]

StrPath = str | os.PathLike[str]


def is_valid_checkpoint(path: StrPath) -> bool:
    """Return True if the required files exist and have the expected sizes."""
    return is_valid_step(Path(path))


def latest_checkpoint(ckpt_root: StrPath) -> str | None:
    """Return the highest valid step, or None; logs a warning for each invalid one."""
    path = latest_step(Path(ckpt_root))
    return None if path is None else str(path)


def prune_checkpoints(ckpt_root: StrPath, keep_last: int) -> None:
    """Keep the `keep_last` highest valid steps and pinned ones; 0 or less keeps all.

    Call it from the process that saves, between saves: it also removes interrupted saves.
    """
    if keep_last > 0:
        remove_interrupted_saves(Path(ckpt_root))
    prune_steps(Path(ckpt_root), StepRetention(keep_last=keep_last))


def save_checkpoint(
    *,
    ckpt_root: StrPath,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    state: Mapping[str, Any],
) -> str:
    """Save a step atomically; returns its directory."""
    content = StepContent(
        weights=named_weights(model),
        optimizer={
            "optimizer": optimizer.state_dict(),
            "scaler": {} if scaler is None else scaler.state_dict(),
        },
        state=state,
        rng=[capture_rng()],
    )
    return str(write_step(Path(ckpt_root), step, content))


def load_checkpoint(
    *,
    ckpt_path: StrPath,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    device: str | torch.device,
) -> dict[str, Any]:
    """Restore model, optimizer, scaler and RNG state; returns the saved state."""
    path = Path(ckpt_path)
    problem = find_step_problem(path, verify_digests=True)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {problem}")
    content = read_step(path, device)
    load_weights(model, content.weights)
    try:
        optimizer.load_state_dict(dict(content.optimizer["optimizer"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the optimizer of {path} does not fit: {error}") from error
    # A disabled scaler has an empty state, which an enabled one does not accept.
    if scaler is not None and content.optimizer.get("scaler"):
        scaler.load_state_dict(content.optimizer["scaler"])
    if content.rng:
        restore_rng(content.rng[0])
    return dict(content.state)
