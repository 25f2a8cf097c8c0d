"""How commands that change something ask first, and end when the answer is no."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click

from tinkex.cli.context import Context
from tinkex.cli.errors import FAILED
from tinkex.cli.output import PropertiesOutput


def yes_option() -> Callable[..., Any]:
    """`-y`: ask nothing."""
    return click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def exit_cancelled(context: Context, data: Mapping[str, Any]) -> NoReturn:
    """End a command whose question was answered with no: nothing was done."""
    if context.is_json:
        PropertiesOutput({**data, "cancelled": True}).print("json")
    click.get_current_context().exit(FAILED)
