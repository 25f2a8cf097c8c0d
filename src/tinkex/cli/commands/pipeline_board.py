"""TensorBoard in the foreground: it runs until a signal ends the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.cli.output import announce
from tinkex.installation import install_command, missing_libraries
from tinkex.pipeline.tensorboard import start_tensorboard


def serve_tensorboard(context: Context, logdir: Path, host: str, port: int) -> None:
    """Serve a directory of curves until Ctrl-C, which is the normal end of this command."""
    if missing_libraries("pipeline"):
        raise CliError("TensorBoard is not installed", f"Run: {install_command('pipeline')}")
    with _return_on_signals():
        board = start_tensorboard(logdir, host=host, port=port)
        assert board is not None  # it is installed
        with board:
            again = ", which a run started and stops" if board.is_reused else "; Ctrl-C stops it"
            announce(
                context,
                f"TensorBoard shows {logdir} at {board.url}{again}.",
                {"url": board.url, "pid": board.pid, "directory": str(logdir)},
            )
            if not board.is_reused:
                board.wait()
                raise CliError(f"TensorBoard ended; its log is {board.log_file}")


@contextmanager
def _return_on_signals() -> Iterator[None]:
    """Leave the block on Ctrl-C or SIGTERM; both are how a server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)
