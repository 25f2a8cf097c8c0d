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
    """Learn to say what the data says.

    DATA has rows {"messages": [{"role": ..., "content": ...}, ...]}, of which what the assistant
    says is learned, or {"prompt": ..., "completion": ...}, of which the completion is. The layouts
    of ShareGPT (conversations with from and value) and of Alpaca (instruction, input, output), and
    {"question": ..., "answer": ...}, are conversations too.
    """
    from tinkex.cli.commands.train.run_recipe import run_recipe
    from tinkex.recipes import sft as recipe
    from tinkex.recipes.plan import SftPlan

    run_recipe(context, SftPlan, recipe, settings)


@click.command(cls=Command)
@recipe_option("--beta", type=float, default=0.1, help="Less lets the model move further.")
@recipe_options(learning_rate=1e-5)
@pass_context
def dpo(context: Context, /, **settings: Any) -> None:
    """Learn to prefer the better of two answers.

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
    help="Called with (row, text); returns a number, more is better.",
)
@recipe_option(
    "--group-size", type=int, default=8, help="How many answers to a prompt are compared."
)
@recipe_option("--answer-tokens", type=int, default=128, help="How long an answer may be.")
@recipe_option("--temperature", type=float, default=1.0, help="How answers are drawn.")
@recipe_option(
    "--loss",
    type=click.Choice(["importance_sampling", "ppo", "cispo"]),
    default="importance_sampling",
    help="The objective.",
)
@recipe_options(learning_rate=1e-5, schedule="constant")
@pass_context
def rl(context: Context, /, **settings: Any) -> None:
    """Learn from a reward function of your own.

    DATA has rows {"prompt": ..., ...}; a prompt is text or messages, and the reward function sees
    the whole row.
    """
    from tinkex.cli.commands.train.run_recipe import run_recipe
    from tinkex.recipes import rl as recipe
    from tinkex.recipes.plan import RlPlan

    run_recipe(context, RlPlan, recipe, settings)
