"""Entry point of the trainers: exit codes, and errors as one sentence.

Options are checked before torch is imported, so that a mistake is reported at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

from tinkex.errors import TinkexError
from tinkex.pipeline.settings_sources import parse_arguments
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.system.disk_errors import DISK_FULL_MESSAGE, is_disk_full
from tinkex.system.processes import no_garbage_collection

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130


def run_program(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code, 1 after an expected error, or 130 after Ctrl-C.

    SIGTERM exits with 143 unless `work` handles it.
    """
    try:
        with _exit_on_sigterm(), _suppress_disk_full_traceback():
            return work()
    except KeyboardInterrupt:
        _print_error("Interrupted.")
        return _EXIT_INTERRUPTED
    except Exception as error:
        if not isinstance(error, TinkexError | OSError | MemoryError) and not is_disk_full(error):
            raise
        _print_error(f"Error: {_describe_error(error)}")
        if isinstance(error, TinkexError) and error.hint:
            _print_error(error.hint)
        return _EXIT_FAILED


def _print_error(text: str) -> None:
    """Print a line to stderr; a closed terminal does not change the exit code."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _describe_error(error: Exception) -> str:
    if not isinstance(error, TinkexError) and is_disk_full(error):
        place = error.filename if isinstance(error, OSError) else None
        return f"{place or 'the disk'}: {DISK_FULL_MESSAGE}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) or "out of memory"


@contextmanager
def _suppress_disk_full_traceback() -> Iterator[None]:
    """Print no traceback for a thread that fails on a full disk, such as TensorBoard's writer.

    The main thread raises the same error, which is then printed once.
    """
    before = threading.excepthook

    def report(failed: threading.ExceptHookArgs) -> None:
        if not is_disk_full(failed.exc_value):
            before(failed)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _handle_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _handle_sigterm(number: int, frame: FrameType | None) -> None:
    # Bypass the buffer of sys.stderr: the signal may have interrupted a write to it.
    with suppress(OSError):
        os.write(2, b"Stopped; saved checkpoints are complete.\n")
    # Not os._exit: temporary files are removed while the stack unwinds.
    raise SystemExit(128 + number)


def main(stage: str, argv: Sequence[str] | None = None) -> int:
    """Train a stage; returns the exit code: 0, 1 after an error, 130 or 143 after a signal."""
    settings = parse_arguments(stage, argv)
    return run_program(lambda: _train_stage(stage, settings))


def _train_stage(stage: str, settings: TrainSettings) -> int:
    # Imported late, so that --help and option errors do not wait for torch.
    with no_garbage_collection():
        module = import_module("tinkex.pipeline.train_stage")
    code: int = module.run(stage, settings)
    return code
