"""`tinkex serve`: run a server; `status`, `stop` and `logs` manage the server of a home."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from tinkex.cli.context import Context, get_context, pass_context
from tinkex.cli.errors import check_server_libraries, missing_extra_error
from tinkex.cli.format import format_timestamp, property_label
from tinkex.cli.options import Command, F, Group
from tinkex.cli.output import PropertiesOutput, announce, show
from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.home import Home
    from tinkex.server_discovery import LockHolder, ServerState

#: Key in click's `ctx.meta` for the --home given before the subcommand.
HOME_KEY = "tinkex.cli.home"
HOME_HELP = "Directory of the server.  [default: TINKEX_HOME, or ~/.tinkex]"
_STOP_POLL_SECONDS = 0.05
_LOG_POLL_SECONDS = 0.2
#: A stopping server may first write its state to disk.
STOP_SECONDS = 60.0


class HomePath(click.Path):
    """A directory; rejects an empty name, which would mean the current directory."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Parse the path."""
        if value == "":
            self.fail("the name is empty; give a directory", param, ctx)
        return super().convert(value, param, ctx)


def home_option(command: F) -> F:
    """Add --home, which selects the server."""
    kind = HomePath(path_type=Path, readable=False)
    return click.option("--home", type=kind, metavar="PATH", help=HOME_HELP)(command)


def engine_options(command: F) -> F:
    """Add the options of a worker: its engine, and where files are stored."""
    options = (
        click.option("--engine", help="Compute engine: local, vllm or fake.  [default: local]"),
        click.option(
            "--vllm-python", metavar="PATH", help="Python that has vLLM, for the engine vllm."
        ),
        click.option(
            "--model",
            "models",
            multiple=True,
            metavar="NAME=PATH",
            help="Base model to serve; may be repeated.",
        ),
        click.option(
            "--device", help="Compute device: cpu or cuda.  [default: a GPU if available]"
        ),
        click.option("--dtype", help="Compute dtype of the models.  [default: float32]"),
        click.option(
            "--blobs",
            metavar="URL",
            help="Object storage for checkpoints: s3://BUCKET/PREFIX, gs:// or az://.  "
            "[default: files in the home]",
        ),
        click.option(
            "--ranks",
            type=int,
            metavar="N",
            help="Processes that compute each training pass together.  [default: 1]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def resolve_home(home: Path | None) -> Home:
    """Return the home given after the subcommand, before it, or the default one."""
    from tinkex.home import Home
    from tinkex.settings import read_environment

    named = home or click.get_current_context().meta.get(HOME_KEY)
    return Home(named.absolute() if named is not None else read_environment().home)


@click.command(cls=Command)
@home_option
@pass_context
def status(context: Context, home: Path | None) -> None:
    """Show whether a server is running; exit code 0 if it responds, 1 if not."""
    from tinkex.server_discovery import find_server

    server_home = resolve_home(home)
    state = find_server(server_home)
    data: dict[str, object] = {
        "status": _server_status(server_home, state is not None),
        "home": str(server_home.root),
    }
    data |= server_properties(state) if state is not None else {}
    show(context, PropertiesOutput(data, _property_rows(data)))
    click.get_current_context().exit(0 if state is not None else 1)


def server_properties(state: ServerState) -> dict[str, object]:
    """Return the properties of a running server."""
    started = datetime.fromtimestamp(state.started_at, UTC).isoformat(timespec="seconds")
    properties = {"url": state.url, "pid": state.pid, "version": state.version}
    return {**properties, "started": started, "log": state.log}


def _property_rows(data: Mapping[str, object]) -> list[tuple[str, str]]:
    """Format the properties for people, with a relative start time."""
    started = data.get("started")
    shown = {**data, "started": format_timestamp(started)} if isinstance(started, str) else data
    return [(property_label(key), str(value)) for key, value in shown.items() if value is not None]


def _server_status(home: Home, answers: bool) -> str:
    from tinkex.server_discovery import find_lock_holder

    if answers:
        return "running"
    return "not answering" if find_lock_holder(home) is not None else "stopped"


@click.command(cls=Command)
@home_option
@click.option("--force", is_flag=True, help="Do not wait for running work to finish.")
@pass_context
def stop(context: Context, home: Path | None, force: bool) -> None:
    """Stop the server; accepted work continues when it starts again."""
    from tinkex.server_discovery import find_lock_holder

    server_home = resolve_home(home)
    holder = find_lock_holder(server_home)
    if holder is None:
        announce(
            context, f"no server is running in {server_home.root}", {"pid": None, "stopped": False}
        )
        click.get_current_context().exit(1)
    pid = holder.pid
    _send_signal(holder, signal.SIGTERM)
    if force:
        # The second signal must differ, because two equal pending signals are merged.
        _send_signal(holder, signal.SIGINT)
    ends_at = time.monotonic() + STOP_SECONDS
    while find_lock_holder(server_home) == holder:
        if time.monotonic() > ends_at:
            raise ConfigError(
                f"the server with pid {pid} did not stop within {STOP_SECONDS:g} seconds",
                hint="Run `tinkex serve stop --force`.",
            )
        time.sleep(_STOP_POLL_SECONDS)
    announce(context, f"the server with pid {pid} has stopped", {"pid": pid, "stopped": True})


def _send_signal(holder: LockHolder, number: signal.Signals) -> None:
    if not holder.is_alive:
        # Its child processes exit on their own, and the pid may already be reused.
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
    "-n", "--lines", type=click.IntRange(0), default=50, show_default=True, help="Number of lines."
)
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, until Ctrl-C.")
@pass_context
def logs(context: Context, home: Path | None, lines: int, follow: bool) -> None:
    """Show the log of a background server."""
    from tinkex.server_discovery import read_state

    server_home = resolve_home(home)
    state = read_state(server_home)
    path = Path(state.log) if state is not None and state.log else server_home.log_file
    if not path.is_file() or (state is not None and state.log is None):
        raise ConfigError(
            f"no server log in {server_home.root}",
            hint="A server in the foreground logs to its own terminal.",
        )
    if context.is_json:
        if follow:
            raise click.UsageError("--follow cannot be combined with JSON output")
        show(context, PropertiesOutput({"log": str(path), "lines": _last_lines(path, lines)}))
        return
    for text in _read_log(path, lines, follow=follow):
        click.echo(text, nl=False)


def _last_lines(path: Path, lines: int) -> list[str]:
    return [text.rstrip("\n") for text in _read_log(path, lines, follow=False)]


def _read_log(path: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """Yield the last lines of a log; with `follow`, also new text, even if the file is rotated."""
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
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0 selects a free port.  [default: 8000]")
@engine_options
@click.option(
    "--sampler",
    "samplers",
    multiple=True,
    metavar="NAME=vllm",
    help="Base model whose samples go to workers with vLLM; may be repeated.",
)
@click.option("--store", metavar="URL", help="Database URL.  [default: SQLite in the home]")
@click.option(
    "--api-key", metavar="KEY", help="API key that clients must send; the variable is safer."
)
@click.option(
    "--api-processes", type=int, metavar="N", help="Number of API processes.  [default: 1]"
)
@click.option("--workers", type=int, metavar="N", help="Number of worker processes.  [default: 1]")
@click.option(
    "--cluster",
    type=click.Choice(["ray"]),
    help="Run the workers on a Ray cluster instead of this machine.",
)
@click.option(
    "--ray-address",
    metavar="ADDRESS",
    help="Ray cluster: HOST:PORT, ray://HOST:PORT or auto.  [default: auto]",
)
@click.option(
    "--max-workers",
    type=int,
    metavar="N",
    help="With --cluster, add workers up to this number when work is queued.",
)
@click.option(
    "--idle-stop",
    "idle_stop_seconds",
    type=float,
    metavar="SECONDS",
    help="Stop after this many seconds without a request.",
)
@click.option("--log-level", help="Log level: debug, info, warning or error.  [default: info]")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="TOML file with settings.  [default: server.toml in the home]",
)
@click.pass_context
def serve(
    ctx: click.Context, /, home: Path | None, config_file: Path | None, **flags: object
) -> None:
    """Run a server on this machine, until Ctrl-C.

    Flags take precedence over environment variables (TINKEX_PORT and so on; TINKEX_SERVER_API_KEY
    for the key), and variables over the file.
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
    flags |= {"models": flags["models"] or None, "samplers": _parse_samplers(flags["samplers"])}
    config = read_config({"home": home, **flags}, config_file)
    check_server_libraries(*(("server", "torch") if config.engine == "local" else ("server",)))
    attach_logger(config.log_level)
    if get_context(ctx).is_json:
        run(config, _print_state)
    else:
        run(config)


def _parse_samplers(pairs: object) -> dict[str, str] | None:
    """Parse NAME=SAMPLER; None if there are none."""
    assert isinstance(pairs, tuple)
    if any("=" not in pair for pair in pairs):
        raise click.UsageError("--sampler is NAME=vllm or NAME=trainer")
    return {name: sampler for name, _, sampler in (pair.rpartition("=") for pair in pairs)} or None


def _print_state(state: ServerState) -> None:
    """Print the server's state as JSON when it is ready."""
    PropertiesOutput({"status": "running", **server_properties(state)}).print("json")
    sys.stdout.flush()


for command in (logs, status, stop):
    serve.add_command(command)
