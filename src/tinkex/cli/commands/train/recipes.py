"""`tinkex train sft`, `dpo` and `rl`."""

from __future__ import annotations

from typing import Any

import click

from tinkex.cli.commands.train.recipe_options import recipe_option, recipe_options
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command


@click.command(cls=Command)
@recipe_options(learning_rate=1e-4)
@pass_context
def sft(context: Context, /, **settings: Any) -> None:
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
def dpo(context: Context, /, **settings: Any) -> None:
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
def rl(context: Context, /, **settings: Any) -> None:
    """Train with a reward function (RL).

    DATA has rows {"prompt": ..., ...}; a prompt is text or messages. The reward function gets the
    whole row.
    """
    from tinkex.cli.commands.train.run_recipe import run_recipe
    from tinkex.recipes import rl as recipe
    from tinkex.recipes.plan import RlPlan

    run_recipe(context, RlPlan, recipe, settings)
