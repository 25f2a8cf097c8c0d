"""The options that all recipes share; they are named like the settings of a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tinkex.cli.id_completion import CHECKPOINT

F = TypeVar("F", bound=Callable[..., Any])
FILE_PATH = click.Path(path_type=Path)


def recipe_options(learning_rate: float, schedule: str = "linear") -> Callable[[F], F]:
    """All shared options, with the defaults in which recipes differ."""

    def decorate(command: F) -> F:
        for add in reversed(
            (
                *_MODEL_OPTIONS,
                *_step_options(learning_rate, schedule),
                *_CHECKPOINT_OPTIONS,
                *_DIRECTORY_OPTIONS,
            )
        ):
            command = add(command)
        return command

    return decorate


def recipe_option(flag: str, name: str | None = None, **details: Any) -> Callable[[F], F]:
    """An option whose default, if it has one, is shown."""
    words = [flag] if name is None else [flag, name]
    has_default = details.get("default") is not None
    return click.option(*words, show_default=has_default, **details)


_MODEL_OPTIONS = (
    click.argument("data", type=FILE_PATH),
    recipe_option(
        "--base-model",
        metavar="NAME",
        help="The model to adapt; without it the one that `tinkex sample` takes.",
    ),
    recipe_option(
        "--from",
        "start_from",
        type=CHECKPOINT,
        metavar="CHECKPOINT",
        help="Start from a tinker:// path of training weights, or latest.",
    ),
    recipe_option("--rank", type=int, default=32, help="The inner dimension of the adapter."),
    recipe_option(
        "--max-tokens", type=int, metavar="N", help="Cut longer examples; by default at what fits."
    ),
)


def _step_options(learning_rate: float, schedule: str) -> tuple[Callable[[Any], Any], ...]:
    return (
        recipe_option("--epochs", type=int, default=1, help="How often every row is seen."),
        recipe_option("--steps", type=int, metavar="N", help="Take so many steps instead."),
        recipe_option("--batch-size", type=int, default=16, help="How many rows go into a step."),
        recipe_option(
            "--learning-rate", type=float, default=learning_rate, help="The largest rate."
        ),
        recipe_option(
            "--schedule",
            type=click.Choice(["constant", "linear", "cosine"]),
            default=schedule,
            help="What follows the warm-up.",
        ),
        recipe_option(
            "--warmup",
            type=float,
            default=0.0,
            help="A number of steps, or below 1 a share of all.",
        ),
        recipe_option(
            "--grad-clip",
            "grad_clip_norm",
            type=float,
            default=1.0,
            help="The largest gradient norm; 0 clips nothing.",
        ),
        recipe_option("--weight-decay", type=float, default=0.0, help="Decoupled weight decay."),
        recipe_option("--seed", type=int, default=0, help="Makes the run repeatable."),
    )


_CHECKPOINT_OPTIONS = (
    recipe_option("--name", metavar="NAME", help="What checkpoints are called."),
    recipe_option(
        "--save-every", type=int, default=50, help="Steps between checkpoints; 0: at the end."
    ),
    recipe_option(
        "--eval",
        "eval_data",
        type=FILE_PATH,
        metavar="FILE",
        help="Rows to measure and not to learn.",
    ),
    recipe_option(
        "--eval-every", type=int, default=50, help="Steps between measurements; 0: at the end."
    ),
    recipe_option(
        "--sample",
        "samples",
        multiple=True,
        metavar="PROMPT",
        help="Answer this at the end; may be given several times.",
    ),
    recipe_option("--sample-tokens", type=int, default=64, help="How long these answers may be."),
)
_DIRECTORY_OPTIONS = (
    recipe_option(
        "--run-dir",
        type=FILE_PATH,
        metavar="DIR",
        help="Where the run is kept; by default in runs, named by settings and data.",
    ),
    recipe_option("--restart", is_flag=True, help="Begin anew, whatever is there."),
    recipe_option(
        "--accept-changes", is_flag=True, help="Go on although settings or data changed."
    ),
)
#: What belongs to the run and not to its plan.
RUN_OPTION_NAMES = ("run_dir", "restart", "accept_changes")
