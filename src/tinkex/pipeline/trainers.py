"""The entry of the four trainers: what is wrong with a command line is told before torch loads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from tinkex.pipeline.arguments import Arguments, parse
from tinkex.pipeline.programs import run_program


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Train a stage; returns the exit code: 0, 1 with a sentence, 130 or 143 after a signal."""
    known = parse(name, argv)
    return run_program(lambda: _train(name, known))


def _train(name: str, known: Arguments) -> int:
    # Late: help and a wrong word should not wait for torch.
    code: int = import_module("tinkex.pipeline.training").run(name, known)
    return code
