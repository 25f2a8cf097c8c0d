"""`tinkex worker`: run a worker for a store that a server elsewhere serves."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tinkex.cli.commands.serve import engine_options, home_option
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import check_server_libraries, missing_extra_error
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput


@click.command(cls=Command)
@click.option("--store", metavar="URL", help="Database URL of the server.")
@home_option
@click.option(
    "--group", metavar="NAME", help="Name of the worker's group.  [default: host name and a suffix]"
)
@engine_options
@click.option("--threads", type=int, metavar="N", help="Compute threads.  [default: one per core]")
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="Wait here for ranks started elsewhere.  [default: start them here]",
)
@click.option("--log-level", help="Log level: debug, info, warning or error.  [default: info]")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="TOML file with settings.  [default: server.toml in the home]",
)
@pass_context
def worker(
    context: Context, /, group: str | None, config_file: Path | None, **flags: object
) -> None:
    """Run a worker for the store of a server, until Ctrl-C.

    The worker takes a share of the server's models and samples. Ctrl-C hands its models over to the
    other workers.
    """
    try:
        from tinkex.logs import attach_logger
        from tinkex.server.config_sources import read_config
        from tinkex.server.process.worker_supervisor import new_group_id, run_worker
    except ModuleNotFoundError as error:
        check_server_libraries("server", "torch")
        raise missing_extra_error(error, "server") from error
    config = read_config({**flags, "models": flags["models"] or None}, config_file)
    check_server_libraries(*(("server", "torch") if config.engine == "local" else ("server",)))
    attach_logger(config.log_level)

    def print_ready(group_id: str) -> None:
        if context.is_json:
            PropertiesOutput({"status": "running", "group": group_id}).print("json")
        else:
            sys.stdout.write(f"tinkex worker ready: group {group_id}\n")
        sys.stdout.flush()

    run_worker(config, new_group_id() if group is None else group, print_ready)
