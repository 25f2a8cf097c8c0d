"""The part of docs/compatibility.md about the cookbook."""

from __future__ import annotations

from collections.abc import Mapping

from tests.compat.cookbook.recipes import NOT_RUN, RECIPES
from tests.compat.page import Column, mark
from tests.compat.versions import COOKBOOK, COOKBOOK_SDK

INTRO = f"""\
## Cookbook

Recipes of `tinker-cookbook` {COOKBOOK}, unmodified, on the same server. The model is `tinkex/tiny`,
served under the name of a model that the cookbook has a renderer for. The datasets of the hub
are replaced by small ones of the same layout, in a folder of the same name in the working
directory, which `datasets` prefers to the hub. A recipe passes if it ends by itself and its figure
does what the table says. RL recipes start from the weights of `chat_sl`, which teaches the layout
in which they expect an answer. One column is `tinker` {COOKBOOK_SDK}; the other is tinkex in its
place (`python -m tinkex.as_tinker`).
"""
FAILURES = """\
Figures and errors of the recipes that fail are printed by `make compat`. They differ from run to
run: a model of this size and a few steps earn little reward, and `sl_loop` and the distillation
start from a loss near zero."""
RULES = {"falls": "falls", "is_earned": "is positive", "is_there": "is reported"}


def cookbook_section(columns: Mapping[str, Column]) -> list[str]:
    """Tables of what runs and of what does not."""
    heads = " | ".join(columns)
    lines = [INTRO, f"| recipe | figure | dataset | {heads} |"]
    lines.append("|---|---|---|" + ":-:|" * len(columns))
    names = {name for column in columns.values() for name in column}
    for recipe in RECIPES:
        cells = " | ".join(mark(column.get(recipe.name)) for column in columns.values())
        figure = f"`{recipe.metric}` {RULES[recipe.rule.__name__]}"
        lines.append(f"| `{recipe.name}` | {figure} | {recipe.stands_in} | {cells} |")
    for name in sorted(names - {recipe.name for recipe in RECIPES}):
        cells = " | ".join(mark(column.get(name)) for column in columns.values())
        lines.append(f"| {name} | | the weights of `chat_sl` | {cells} |")
    lines += ["", FAILURES, "", "Not run:", "", "| recipes | why |", "|---|---|"]
    return [*lines, *(f"| {names} | {why} |" for names, why in NOT_RUN.items()), ""]
