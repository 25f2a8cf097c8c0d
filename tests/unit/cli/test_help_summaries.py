"""Command summaries in the help of every group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest

from tinkex.cli.main import main


def groups(command: click.Command, ctx: click.Context) -> Iterator[click.Context]:
    if isinstance(command, click.Group):
        yield ctx
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from groups(found, click.Context(found, parent=ctx, info_name=name))


SETTINGS: dict[str, Any] = dict(main.context_settings)
GROUPS = list(groups(main, click.Context(main, info_name="tinkex", **SETTINGS)))


@pytest.mark.parametrize("ctx", GROUPS, ids=lambda ctx: ctx.command_path)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_command_summaries_are_not_truncated(ctx: click.Context, width: int) -> None:
    ctx.terminal_width = width
    text = ctx.command.get_help(ctx)
    lines = text.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()

    assert isinstance(ctx.command, click.Group)
    assert len(lines) >= len(ctx.command.list_commands(ctx)) > 0
    assert [line for line in lines if line.endswith("...")] == []
    assert max(map(len, lines)) <= width
