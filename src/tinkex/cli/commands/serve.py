"""`tinkex serve`: run a server, ask how it is, stop it, read its log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.commands.serve_control import (
    HOME_KEY,
    home_option,
    logs,
    server_properties,
    status,
    stop,
)
from tinkex.cli.context import get_context
from tinkex.cli.errors import check_server_libraries, missing_extra_error
from tinkex.cli.options import Group
from tinkex.cli.output import PropertiesOutput

if TYPE_CHECKING:
    from tinkex.presence import ServerState


@click.group(cls=Group, invoke_without_command=True)
@home_option
@click.option("--host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="The port; 0 takes any that is free.  [default: 8000]")
@click.option("--engine", help="Who computes: local or fake.  [default: local]")
@click.option(
    "--model", "models", multiple=True, metavar="NAME=PATH", help="A base model; may be repeated."
)
@click.option("--device", help="Where models compute: cpu, cuda.  [default: a GPU if there is one]")
@click.option("--dtype", help="What models compute with.  [default: float32]")
@click.option("--store", metavar="URL", help="The database; SQLite in the home if not given.")
@click.option("--api-key", metavar="KEY", help="A key that opens the server; prefer the variable.")
@click.option("--api-processes", type=int, metavar="N", help="How many answer.  [default: 1]")
@click.option(
    "--idle-stop",
    "idle_stop_seconds",
    type=float,
    metavar="SECONDS",
    help="Stop after so long without a request.",
)
@click.option("--log-level", help="debug, info, warning or error.  [default: info]")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="A TOML file of settings; the home's server.toml if not given.",
)
@click.pass_context
def serve(ctx: click.Context, /, home: Path | None, config_file: Path | None, **flags: Any) -> None:
    """Run a server on this machine, until Ctrl-C.

    Flags win over variables (TINKEX_PORT and so on; TINKEX_SERVER_API_KEY for the key), variables
    over the file.
    """
    ctx.meta[HOME_KEY] = home
    if ctx.invoked_subcommand is not None:
        return
    try:
        from tinkex.logs import attach_logger
        from tinkex.server.config_sources import read_config
        from tinkex.server.supervisor import serve as run
    except ModuleNotFoundError as error:
        check_server_libraries("server", "torch")
        raise missing_extra_error(error, "server") from error
    config = read_config({"home": home, **flags, "models": flags["models"] or None}, config_file)
    check_server_libraries(*(("server", "torch") if config.engine == "local" else ("server",)))
    attach_logger(config.log_level)
    if get_context(ctx).is_json:
        run(config, _print_state)
    else:
        run(config)


def _print_state(state: ServerState) -> None:
    """For programs: where the server is, when it is ready."""
    PropertiesOutput({"status": "running", **server_properties(state)}).print("json")
    sys.stdout.flush()


for command in (logs, status, stop):
    serve.add_command(command)
