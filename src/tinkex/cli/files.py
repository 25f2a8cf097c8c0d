"""Files and directories that commands write: checked before any work is done for them."""

from __future__ import annotations

import os
from pathlib import Path

from tinkex.cli.errors import CliError


def resolve_output_file(path: Path) -> Path:
    """Where to write, links followed; refused here if that cannot work, before any work."""
    final = path.resolve()
    if final.exists() and not final.is_file():
        raise CliError(f"--output must be a file, and {path} is none", "Name another.")
    _check_writable(path, final.parent, "Name another --output.")
    return final


def check_run_directory(path: Path) -> None:
    """Refuse a directory that cannot be made or written, before any work is done for it."""
    _check_writable(path, path.absolute(), "Name another with --run-dir.")


def _check_writable(path: Path, directory: Path, hint: str) -> None:
    """Refuse a directory that cannot be written, nor made below one that can."""
    nearest = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CliError(
            f"{path} cannot be written: {nearest} is not a directory that this user can write to",
            hint,
        )
