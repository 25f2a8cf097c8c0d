"""`tinkex train sft`, `dpo` and `rl`: their options and commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.id_arguments import CHECKPOINT
from tinkex.cli.options import Command, F

if TYPE_CHECKING:
    from tinkex.regularizers import Regularizer

FILE_PATH = click.Path(path_type=Path)


class OptionDecorator(Protocol):
    """Adds an option to a command."""

    def __call__(self, command: F, /) -> F:
        """Return the command with the option."""
        ...


def recipe_options(learning_rate: float, schedule: str = "linear") -> Callable[[F], F]:
    """Add all shared options, with the defaults of a recipe."""

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
    """Create an option that shows its default."""
    words = [flag] if name is None else [flag, name]
    has_default = details.get("default") is not None
    return click.option(*words, show_default=has_default, **details)


def _read_regularizers(
    context: click.Context, option: click.Parameter, path: Path | None
) -> tuple[Regularizer, ...]:
    from tinkex.regularizers import load_regularizers

    return () if path is None else load_regularizers(path)


_MODEL_OPTIONS = (
    click.argument("data", type=FILE_PATH),
    recipe_option(
        "--base-model",
        metavar="NAME",
        help="Base model to adapt.  [default: same as for `tinkex sample`]",
    ),
    recipe_option(
        "--from",
        "start_from",
        type=CHECKPOINT,
        metavar="CHECKPOINT",
        help="Start from training weights: a tinker:// path, or latest.",
    ),
    recipe_option("--rank", type=int, default=32, help="LoRA rank."),
    recipe_option(
        "--alpha",
        type=float,
        metavar="NUMBER",
        help="LoRA alpha; the update is scaled by alpha / rank.  [default: 32]",
    ),
    recipe_option("--rslora", "use_rslora", is_flag=True, help="Scale by alpha / sqrt(rank)."),
    recipe_option(
        "--target-module",
        "target_modules",
        multiple=True,
        metavar="NAME",
        help="Adapt only modules of this name, such as q_proj; may be repeated.",
    ),
    recipe_option(
        "--max-tokens",
        type=int,
        metavar="N",
        help="Truncate examples to N tokens.  [default: context length]",
    ),
)


def _step_options(learning_rate: float, schedule: str) -> tuple[OptionDecorator, ...]:
    return (
        recipe_option("--epochs", type=int, default=1, help="Number of passes over the data."),
        recipe_option(
            "--steps", type=int, metavar="N", help="Number of steps, instead of --epochs."
        ),
        recipe_option("--batch-size", type=int, default=16, help="Number of rows per step."),
        recipe_option(
            "--learning-rate", type=float, default=learning_rate, help="Peak learning rate."
        ),
        recipe_option(
            "--schedule",
            type=click.Choice(["constant", "linear", "cosine"]),
            default=schedule,
            help="Learning-rate schedule after the warm-up.",
        ),
        recipe_option(
            "--warmup",
            type=float,
            default=0.0,
            help="Warm-up steps; below 1, a fraction of all steps.",
        ),
        recipe_option(
            "--grad-clip",
            "grad_clip_norm",
            type=float,
            default=1.0,
            help="Maximum gradient norm; 0 disables clipping.",
        ),
        recipe_option("--weight-decay", type=float, default=0.0, help="Decoupled weight decay."),
        recipe_option("--seed", type=int, default=0, help="Random seed."),
        recipe_option(
            "--regularizers",
            type=FILE_PATH,
            callback=_read_regularizers,
            metavar="FILE.toml",
            help="Add the [[regularizer]] terms of this file to the loss; needs torch.",
        ),
    )


_CHECKPOINT_OPTIONS = (
    recipe_option("--name", metavar="NAME", help="Name of the checkpoints."),
    recipe_option(
        "--save-every",
        type=int,
        default=50,
        help="Steps between checkpoints; 0 saves only at the end.",
    ),
    recipe_option(
        "--keep-checkpoints",
        type=int,
        metavar="K",
        help="Delete training checkpoints of this run except the newest K.  [default: keep all]",
    ),
    recipe_option(
        "--eval",
        "eval_data",
        type=FILE_PATH,
        metavar="FILE",
        help="JSONL file with evaluation data.",
    ),
    recipe_option(
        "--eval-every",
        type=int,
        default=50,
        help="Steps between evaluations; 0 evaluates only at the end.",
    ),
    recipe_option(
        "--sample",
        "samples",
        multiple=True,
        metavar="PROMPT",
        help="Sample a reply to this prompt at the end; may be repeated.",
    ),
    recipe_option(
        "--sample-tokens", type=int, default=64, help="Maximum number of tokens of these replies."
    ),
)
_DIRECTORY_OPTIONS = (
    recipe_option(
        "--run-dir",
        type=FILE_PATH,
        metavar="DIR",
        help="Directory of the run.  [default: in runs, named by settings and data]",
    ),
    recipe_option("--restart", is_flag=True, help="Discard any existing run and start over."),
    recipe_option(
        "--accept-changes", is_flag=True, help="Resume even if settings or data have changed."
    ),
)


@click.command(cls=Command)
@recipe_options(learning_rate=1e-4)
@pass_context
def sft(context: Context, /, **settings: object) -> None:
    """Train on conversations or completions (SFT).

    DATA has rows {"messages": [{"role": ..., "content": ...}, ...]}, trained on the assistant
    messages, or {"prompt": ..., "completion": ...}, trained on the completion. The layouts of
    ShareGPT (conversations with from and value) and Alpaca (instruction, input, output), and
    {"question": ..., "answer": ...}, are also accepted.
    """
    from tinkex.cli.commands.train.run_recipe import run_recipe
    from tinkex.recipes import sft as recipe
    from tinkex.recipes.plan import SftPlan

    run_recipe(context, SftPlan, recipe, settings)


@click.command(cls=Command)
@recipe_option(
    "--beta",
    type=float,
    default=0.1,
    help="DPO beta; smaller values allow larger changes of the model.",
)
@recipe_options(learning_rate=1e-5)
@pass_context
def dpo(context: Context, /, **settings: object) -> None:
    """Train on preferences (DPO).

    DATA has rows {"prompt": ..., "chosen": ..., "rejected": ...}; a prompt is text or messages.
    Without a prompt, chosen and rejected are conversations that differ in their last message.
    """
    from tinkex.cli.commands.train.run_recipe import run_recipe
    from tinkex.recipes import dpo as recipe
    from tinkex.recipes.plan import DpoPlan

    run_recipe(context, DpoPlan, recipe, settings)


@click.command(cls=Command)
@recipe_option(
    "--reward",
    required=True,
    metavar="FILE.py:FUNCTION",
    help="Reward function, called with (row, text); higher return values are better.",
)
@recipe_option("--group-size", type=int, default=8, help="Number of samples per prompt.")
@recipe_option(
    "--answer-tokens", type=int, default=128, help="Maximum number of tokens per sample."
)
@recipe_option("--temperature", type=float, default=1.0, help="Sampling temperature.")
@recipe_option(
    "--loss",
    type=click.Choice(["importance_sampling", "ppo", "cispo"]),
    default="importance_sampling",
    help="Loss function.",
)
@recipe_options(learning_rate=1e-5, schedule="constant")
@pass_context
def rl(context: Context, /, **settings: object) -> None:
    """Train with a reward function (RL).

    DATA has rows {"prompt": ..., ...}; a prompt is text or messages. The reward function gets the
    whole row.
    """
    from tinkex.cli.commands.train.run_recipe import run_recipe
    from tinkex.recipes import rl as recipe
    from tinkex.recipes.plan import RlPlan

    run_recipe(context, RlPlan, recipe, settings)
