"""The entry of the four trainers: what is wrong with a command line is told before torch loads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from tinkex.pipeline.arguments import TrainerArguments, parse_arguments
from tinkex.pipeline.programs import run_program


def main(stage: str, argv: Sequence[str] | None = None) -> int:
    """Train a stage; returns the exit code: 0, 1 with a sentence, 130 or 143 after a signal."""
    known = parse_arguments(stage, argv)
    return run_program(lambda: _train_stage(stage, known))


def _train_stage(stage: str, args: TrainerArguments) -> int:
    # Late: help and a wrong word should not wait for torch.
    code: int = import_module("tinkex.pipeline.training").run(stage, args)
    return code
