"""The entry of the four trainers: what is wrong with a command line is told before torch loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from tinkex.errors import TinkexError
from tinkex.pipeline.arguments import parse

_FAILED, _INTERRUPTED = 1, 130


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Train a stage; returns the exit code: 0, 1 with a sentence, 130 or 143 after a signal."""
    known = parse(name, argv)
    try:
        # Late: help and a wrong word should not wait for torch.
        code: int = import_module("tinkex.pipeline.training").run(name, known)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return _INTERRUPTED
    except (TinkexError, OSError, MemoryError) as error:
        sys.stderr.write(f"Error: {str(error) or 'there is not enough memory'}\n")
        if isinstance(error, TinkexError) and error.hint:
            sys.stderr.write(f"{error.hint}\n")
        return _FAILED
    return code
