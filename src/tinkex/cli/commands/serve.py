"""`tinkex serve status`, `stop` and `logs`: about the server that runs in a home."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from tinkex.cli.context import Context, get_context, pass_context
from tinkex.cli.errors import check_server_libraries, missing_extra_error
from tinkex.cli.format import format_timestamp, property_label
from tinkex.cli.options import Command, Group
from tinkex.cli.output import PropertiesOutput, announce, show
from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.home import Home
    from tinkex.server_discovery import LockHolder, ServerState

#: Where the home that was named before the command is kept.
HOME_KEY = "tinkex.cli.home"
HOME_HELP = "The server's directory; TINKEX_HOME or ~/.tinkex if not given."
_STOP_POLL_SECONDS = 0.05
_LOG_POLL_SECONDS = 0.2
#: A server may write what it has in memory before it ends.
STOP_SECONDS = 60.0


class HomePath(click.Path):
    """A directory; an empty name is none, and would mean the one that the shell is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value == "":
            self.fail("the name is empty; name a directory", param, ctx)
        return super().convert(value, param, ctx)


def home_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option that says which server is meant."""
    kind = HomePath(path_type=Path, readable=False)
    return click.option("--home", type=kind, metavar="PATH", help=HOME_HELP)(command)


def resolve_home(home: Path | None) -> Home:
    """The home that was named behind the command, before it, or nowhere."""
    from tinkex.home import Home
    from tinkex.settings import read_environment

    named = home or click.get_current_context().meta.get(HOME_KEY)
    return Home(named.absolute() if named is not None else read_environment().home)


@click.command(cls=Command)
@home_option
@pass_context
def status(context: Context, home: Path | None) -> None:
    """Say whether a server runs; exit code 0 if it answers, 1 if not."""
    from tinkex.server_discovery import find_server

    found = resolve_home(home)
    state = find_server(found)
    facts: dict[str, Any] = {
        "status": _server_status(found, state is not None),
        "home": str(found.root),
    }
    facts |= server_properties(state) if state is not None else {}
    show(context, PropertiesOutput(facts, _property_rows(facts)))
    click.get_current_context().exit(0 if state is not None else 1)


def server_properties(state: ServerState) -> dict[str, Any]:
    """What a running server says of itself."""
    started = datetime.fromtimestamp(state.started_at, UTC).isoformat(timespec="seconds")
    facts = {"url": state.url, "pid": state.pid, "version": state.version}
    return {**facts, "started": started, "log": state.log}


def _property_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts as people read them: the start as a time from now."""
    shown = (
        {**facts, "started": format_timestamp(facts["started"])} if "started" in facts else facts
    )
    return [(property_label(key), str(value)) for key, value in shown.items() if value is not None]


def _server_status(home: Home, answers: bool) -> str:
    from tinkex.server_discovery import find_lock_holder

    if answers:
        return "running"
    return "not answering" if find_lock_holder(home) is not None else "stopped"


@click.command(cls=Command)
@home_option
@click.option("--force", is_flag=True, help="Do not wait for work that is being finished.")
@pass_context
def stop(context: Context, home: Path | None, force: bool) -> None:
    """Stop the server; what was acknowledged is done when it starts again."""
    from tinkex.server_discovery import find_lock_holder

    found = resolve_home(home)
    holder = find_lock_holder(found)
    if holder is None:
        announce(context, f"no server runs in {found.root}", {"pid": None, "stopped": False})
        click.get_current_context().exit(1)
    pid = holder.pid
    _send_signal(holder, signal.SIGTERM)
    if force:
        # A second signal is impatient; another one, because two of the same may arrive as one.
        _send_signal(holder, signal.SIGINT)
    ends_at = time.monotonic() + STOP_SECONDS
    while find_lock_holder(found) == holder:
        if time.monotonic() > ends_at:
            raise ConfigError(
                f"the server with pid {pid} has not stopped within {STOP_SECONDS:g} s",
                hint="Run `tinkex serve stop --force`.",
            )
        time.sleep(_STOP_POLL_SECONDS)
    announce(context, f"the server with pid {pid} has stopped", {"pid": pid, "stopped": True})


def _send_signal(holder: LockHolder, number: signal.Signals) -> None:
    if not holder.is_alive:
        # Its processes end by themselves, and its pid may be another program's by now.
        return
    try:
        os.kill(holder.pid, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ConfigError(f"the server with pid {holder.pid} belongs to another user") from error


@click.command(cls=Command)
@home_option
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=50, show_default=True, help="How many lines."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@pass_context
def logs(context: Context, home: Path | None, lines: int, follow: bool) -> None:
    """Show the log of a server that runs in the background."""
    from tinkex.server_discovery import read_state

    found = resolve_home(home)
    state = read_state(found)
    path = Path(state.log) if state is not None and state.log else found.log_file
    if not path.is_file() or (state is not None and state.log is None):
        raise ConfigError(
            f"no log file of a server is in {found.root}",
            hint="A server in the foreground says everything in its own terminal.",
        )
    if context.is_json:
        if follow:
            raise click.UsageError("--follow has no end, and JSON needs one; leave one of them out")
        show(context, PropertiesOutput({"log": str(path), "lines": _last_lines(path, lines)}))
        return
    for text in _read_log(path, lines, follow=follow):
        click.echo(text, nl=False)


def _last_lines(path: Path, lines: int) -> list[str]:
    return [text.rstrip("\n") for text in _read_log(path, lines, follow=False)]


def _read_log(path: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """The end of a log, and what is written from then on, also when the file is replaced."""
    file = path.open(encoding="utf-8", errors="replace")
    try:
        yield from deque(file, maxlen=lines)
        while follow:
            if text := file.read():
                yield text
                continue
            time.sleep(_LOG_POLL_SECONDS)
            if _is_replaced(path, file):
                file.close()
                file = path.open(encoding="utf-8", errors="replace")
    finally:
        file.close()


def _is_replaced(path: Path, file: TextIO) -> bool:
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return now.st_ino != os.fstat(file.fileno()).st_ino or now.st_size < file.tell()


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
        from tinkex.server.process.supervisor import serve as run
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
