"""The official `tinker` command, called as its script does, each call in a fork."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.compat.scenarios.context import Absent, ScenarioContext, scenario

COMMAND = "Command line"


@cache
def entry_point() -> Any:
    """The function that the script `tinker` calls."""
    found = metadata.distribution("tinker").entry_points
    scripts = [each for each in found if each.group == "console_scripts" and each.name == "tinker"]
    if not scripts:
        raise Absent("the tinker command")
    return scripts[0].load()


def need_command(group: str, name: str = "") -> None:
    """Skip the scenario unless the command is there."""
    entry_point()
    try:
        module = importlib.import_module(f"tinker.cli.commands.{group}")
    except ModuleNotFoundError:
        raise Absent(f"tinker {group}") from None
    if name and name not in module.cli.commands:
        raise Absent(f"tinker {group} {name}")


def tinker_command(ctx: ScenarioContext, *arguments: str) -> str:
    """Run the command to its end; it must succeed. Returns what it printed."""
    main = entry_point()
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            become(main, ctx, arguments, output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read()
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"tinker {' '.join(arguments)} ended with {code}: {text[-500:]}"
    return text


def become(main: Any, ctx: ScenarioContext, arguments: tuple[str, ...], output: int) -> None:
    """Run in the fork: call the command with its output redirected, and exit."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(TINKER_BASE_URL=ctx.url, TINKER_API_KEY=ctx.key, COLUMNS="300")
    sys.argv = ["tinker", *arguments]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        os._exit(code)


@scenario(COMMAND, "`tinker version`")
def cli_version(ctx: ScenarioContext) -> None:
    assert metadata.version("tinker") in tinker_command(ctx, "version")


@scenario(COMMAND, "`tinker run list`, `run info`")
def cli_runs(ctx: ScenarioContext) -> None:
    need_command("run")
    assert ctx.run in tinker_command(ctx, "-f", "json", "run", "list")
    assert ctx.run in tinker_command(ctx, "-f", "json", "run", "info", ctx.run)


@scenario(COMMAND, "`tinker checkpoint list`, `checkpoint info`")
def cli_checkpoints(ctx: ScenarioContext) -> None:
    need_command("checkpoint")
    path = plain(ctx)
    assert path in tinker_command(ctx, "-f", "json", "checkpoint", "list")
    arguments = ("-f", "json", "checkpoint", "list", "--run-id", ctx.run)
    assert path in tinker_command(ctx, *arguments)
    assert path in tinker_command(ctx, "-f", "json", "checkpoint", "info", path)


@scenario(COMMAND, "`tinker checkpoint publish`, `unpublish`")
def cli_publish(ctx: ScenarioContext) -> None:
    need_command("checkpoint", "publish")
    tinker_command(ctx, "checkpoint", "publish", plain(ctx))
    tinker_command(ctx, "checkpoint", "unpublish", plain(ctx))


@scenario(COMMAND, "`tinker checkpoint set-ttl`")
def cli_ttl(ctx: ScenarioContext) -> None:
    need_command("checkpoint", "set-ttl")
    tinker_command(ctx, "checkpoint", "set-ttl", plain(ctx), "--ttl", "7200")
    tinker_command(ctx, "checkpoint", "set-ttl", plain(ctx), "--remove")


@scenario(COMMAND, "`tinker checkpoint download`")
def cli_download(ctx: ScenarioContext) -> None:
    need_command("checkpoint", "download")
    with tempfile.TemporaryDirectory() as folder:
        tinker_command(ctx, "checkpoint", "download", plain(ctx), "--output", folder)
        assert [each for each in Path(folder).rglob("*") if each.is_file()]


@scenario(COMMAND, "`tinker checkpoint delete`")
def cli_delete(ctx: ScenarioContext) -> None:
    need_command("checkpoint", "delete")
    path = f"tinker://{ctx.run}/weights/spare"
    tinker_command(ctx, "checkpoint", "delete", path, "--yes")
    assert path not in tinker_command(ctx, "-f", "json", "checkpoint", "list")


@scenario(COMMAND, "`tinker model list`")
def cli_models(ctx: ScenarioContext) -> None:
    need_command("model", "list")
    assert ctx.base_model in tinker_command(ctx, "model", "list")


@scenario(COMMAND, "`tinker session export-trace`")
def cli_trace(ctx: ScenarioContext) -> None:
    need_command("session", "export-trace")
    session = ctx.run.partition(":")[0]
    assert "http" in tinker_command(ctx, "session", "export-trace", session, "--url-only")


@scenario(COMMAND, "`tinker billing usage`")
def cli_billing(ctx: ScenarioContext) -> None:
    need_command("billing", "usage")
    tinker_command(ctx, "billing", "usage", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")


@scenario(COMMAND, "`tinker auth status`")
def cli_auth(ctx: ScenarioContext) -> None:
    need_command("auth", "status")
    assert ctx.key not in tinker_command(ctx, "auth", "status"), "the key was printed"


def plain(ctx: ScenarioContext) -> str:
    """The path of a training checkpoint that all commands read."""
    return f"tinker://{ctx.run}/weights/plain"
