"""The part of docs/compatibility.md about the cookbook."""

from __future__ import annotations

from collections.abc import Mapping

from tests.compat.cookbook.recipes import EARNED, HIGH, NOT_RUN, RECIPES
from tests.compat.cookbook.runner import UTILITIES
from tests.compat.page import Column, mark
from tests.compat.results import DEFECT
from tests.compat.versions import COOKBOOK, COOKBOOK_SDK

INTRO = f"""\
## Cookbook

Recipes of `tinker-cookbook` {COOKBOOK}, unmodified, on the same server. The model is `tinkex/tiny`,
served under the name of a model that the cookbook has a renderer for. The datasets of the hub
are replaced by small ones of the same layout, in a folder of the same name in the working
directory, which `datasets` prefers to the hub. A recipe passes if it ends by itself and its figure
does what the table says. RL recipes start from the weights of `chat_sl`, which teaches the layout
in which they expect an answer; the distillation starts from an early checkpoint of it, and the last
one is its teacher. One column is `tinker` {COOKBOOK_SDK}; the other is tinkex in its place
(`python -m tinkex.as_tinker`).
"""
FIGURES = """\
`make compat` prints the figures and the errors of recipes that fail; they differ from run to run.
"""
LIMIT = "cookbook"
LIMITS = f"""\
"{LIMIT}": the cookbook itself cannot do this, for these reasons:
"""
RULES = {
    "falls": "falls",
    "is_high": f"reaches {HIGH}",
    "is_earned": f"reaches {EARNED}",
    "is_there": "is reported",
}
OWN_WEIGHTS = "a model that it trains for some steps; the result has to give the same log-probs"


def cookbook_section(columns: Mapping[str, Column]) -> list[str]:
    """Tables of what runs and of what does not."""
    lines = [INTRO, f"| recipe | figure | dataset | {' | '.join(columns)} |"]
    lines.append("|---|---|---|" + ":-:|" * len(columns))
    for recipe in RECIPES:
        figure = f"`{recipe.metric}` {RULES[recipe.rule.__name__]}"
        lines.append(row(columns, recipe.name, f"`{recipe.name}`", figure, recipe.stands_in))
    for name, kind in UTILITIES.items():
        data = "the weights of `chat_sl`" if kind == "download" else OWN_WEIGHTS
        lines.append(row(columns, name, name, "", data))
    lines += ["", FIGURES, *limits(columns), "Not run:", "", "| recipes | why |", "|---|---|"]
    return [*lines, *(f"| {names} | {why} |" for names, why in NOT_RUN.items()), ""]


def row(columns: Mapping[str, Column], name: str, *texts: str) -> str:
    """One row of the table."""
    found = [column.get(name) for column in columns.values()]
    cells = [LIMIT if each and each.status == DEFECT else mark(each) for each in found]
    return f"| {' | '.join([*texts, *cells])} |"


def limits(columns: Mapping[str, Column]) -> list[str]:
    """What the cookbook cannot do, and why."""
    reasons = {
        each.name: each.detail
        for column in columns.values()
        for each in column.values()
        if each.status == DEFECT
    }
    return [LIMITS, *(f"- {name}: {why}" for name, why in reasons.items()), ""] if reasons else []
