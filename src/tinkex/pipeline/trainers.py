"""The entry of the four trainers: what is wrong with a command line is told before torch loads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from tinkex.errors import TinkexError
from tinkex.pipeline.arguments import parse

_FAILED, _INTERRUPTED = 1, 130


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Train a stage; returns the exit code: 0, 1 with a sentence, 130 or 143 after a signal."""
    known = parse(name, argv)
    try:
        with _ending_on_request():
            # Late: help and a wrong word should not wait for torch.
            code: int = import_module("tinkex.pipeline.training").run(name, known)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return _INTERRUPTED
    except (TinkexError, OSError, MemoryError) as error:
        sys.stderr.write(f"Error: {_sentence(error)}\n")
        if isinstance(error, TinkexError) and error.hint:
            sys.stderr.write(f"{error.hint}\n")
        return _FAILED
    return code


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) or "there is not enough memory"


@contextmanager
def _ending_on_request() -> Iterator[None]:
    """Until the loop takes over, a request to stop ends the program: there is nothing to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    # Past Python's own buffer: the signal may have come in the middle of a write to it.
    os.write(2, b"Stopped before training began, or after its end: nothing is lost.\n")
    # Not os._exit: whatever is half written is cleared away on the way out.
    raise SystemExit(128 + number)
