"""How a program of the pipeline ends: its exit code, and a sentence about what went wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tinkex.checkpoint.disk import DISK_FULL_MESSAGE, is_disk_full
from tinkex.errors import TinkexError

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130


def run_program(work: Callable[[], int]) -> int:
    """Do the work; returns its code, 1 after a sentence on stderr, or 130 after Ctrl-C.

    SIGTERM ends the process with 143, unless the work handles it itself.
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
    """A line on stderr; that nobody can read it any more changes no exit code."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _describe_error(error: Exception) -> str:
    if not isinstance(error, TinkexError) and is_disk_full(error):
        place = error.filename if isinstance(error, OSError) else None
        return f"{place or 'the disk'}: {DISK_FULL_MESSAGE}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) or "there is not enough memory"


@contextmanager
def _suppress_disk_full_traceback() -> Iterator[None]:
    """Print no traceback of a thread that found the disk full, such as TensorBoard's writer.

    The thread that waits for it raises the same error, which becomes the program's sentence.
    """
    before = threading.excepthook

    def tell(failed: threading.ExceptHookArgs) -> None:
        if not is_disk_full(failed.exc_value):
            before(failed)

    threading.excepthook = tell
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
    # Past Python's own buffer: the signal may have come in the middle of a write to it.
    with suppress(OSError):
        os.write(2, b"Stopped; whatever was saved is whole.\n")
    # Not os._exit: whatever is half written is cleared away on the way out.
    raise SystemExit(128 + number)
