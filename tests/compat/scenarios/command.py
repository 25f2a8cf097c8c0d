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

from tests.compat.scenarios.context import Absent, Lab, scenario

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


def tinker_command(lab: Lab, *arguments: str) -> str:
    """Run the command to its end; it must succeed. Returns what it printed."""
    main = entry_point()
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            become(main, lab, arguments, output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read()
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"tinker {' '.join(arguments)} ended with {code}: {text[-500:]}"
    return text


def become(main: Any, lab: Lab, arguments: tuple[str, ...], output: int) -> None:
    """Run in the fork: call the command with its output redirected, and exit."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(TINKER_BASE_URL=lab.url, TINKER_API_KEY=lab.key, COLUMNS="300")
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
def cli_version(lab: Lab) -> None:
    assert metadata.version("tinker") in tinker_command(lab, "version")


@scenario(COMMAND, "`tinker run list`, `run info`")
def cli_runs(lab: Lab) -> None:
    need_command("run")
    assert lab.run in tinker_command(lab, "-f", "json", "run", "list")
    assert lab.run in tinker_command(lab, "-f", "json", "run", "info", lab.run)


@scenario(COMMAND, "`tinker checkpoint list`, `checkpoint info`")
def cli_checkpoints(lab: Lab) -> None:
    need_command("checkpoint")
    path = plain(lab)
    assert path in tinker_command(lab, "-f", "json", "checkpoint", "list")
    arguments = ("-f", "json", "checkpoint", "list", "--run-id", lab.run)
    assert path in tinker_command(lab, *arguments)
    assert path in tinker_command(lab, "-f", "json", "checkpoint", "info", path)


@scenario(COMMAND, "`tinker checkpoint publish`, `unpublish`")
def cli_publish(lab: Lab) -> None:
    need_command("checkpoint", "publish")
    tinker_command(lab, "checkpoint", "publish", plain(lab))
    tinker_command(lab, "checkpoint", "unpublish", plain(lab))


@scenario(COMMAND, "`tinker checkpoint set-ttl`")
def cli_ttl(lab: Lab) -> None:
    need_command("checkpoint", "set-ttl")
    tinker_command(lab, "checkpoint", "set-ttl", plain(lab), "--ttl", "7200")
    tinker_command(lab, "checkpoint", "set-ttl", plain(lab), "--remove")


@scenario(COMMAND, "`tinker checkpoint download`")
def cli_download(lab: Lab) -> None:
    need_command("checkpoint", "download")
    with tempfile.TemporaryDirectory() as folder:
        tinker_command(lab, "checkpoint", "download", plain(lab), "--output", folder)
        assert [each for each in Path(folder).rglob("*") if each.is_file()]


@scenario(COMMAND, "`tinker checkpoint delete`")
def cli_delete(lab: Lab) -> None:
    need_command("checkpoint", "delete")
    path = f"tinker://{lab.run}/weights/spare"
    tinker_command(lab, "checkpoint", "delete", path, "--yes")
    assert path not in tinker_command(lab, "-f", "json", "checkpoint", "list")


@scenario(COMMAND, "`tinker model list`")
def cli_models(lab: Lab) -> None:
    need_command("model", "list")
    assert lab.base_model in tinker_command(lab, "model", "list")


@scenario(COMMAND, "`tinker session export-trace`")
def cli_trace(lab: Lab) -> None:
    need_command("session", "export-trace")
    session = lab.run.partition(":")[0]
    assert "http" in tinker_command(lab, "session", "export-trace", session, "--url-only")


@scenario(COMMAND, "`tinker billing usage`")
def cli_billing(lab: Lab) -> None:
    need_command("billing", "usage")
    tinker_command(lab, "billing", "usage", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")


@scenario(COMMAND, "`tinker auth status`")
def cli_auth(lab: Lab) -> None:
    need_command("auth", "status")
    assert lab.key not in tinker_command(lab, "auth", "status"), "the key was printed"


def plain(lab: Lab) -> str:
    """The path of a training checkpoint that all commands read."""
    return f"tinker://{lab.run}/weights/plain"
