"""How a program of the pipeline ends: its exit code, and a sentence about what went wrong."""

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
from tinkex.pipeline.trainer_arguments import TrainerArguments, parse_arguments
from tinkex.system.disk_errors import DISK_FULL_MESSAGE, is_disk_full

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


def main(stage: str, argv: Sequence[str] | None = None) -> int:
    """Train a stage; returns the exit code: 0, 1 with a sentence, 130 or 143 after a signal."""
    known = parse_arguments(stage, argv)
    return run_program(lambda: _train_stage(stage, known))


def _train_stage(stage: str, args: TrainerArguments) -> int:
    # Late: help and a wrong word should not wait for torch.
    code: int = import_module("tinkex.pipeline.train_stage").run(stage, args)
    return code
