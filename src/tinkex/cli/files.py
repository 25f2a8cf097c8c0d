"""Files that commands write: looked at before any work is done for them."""

from __future__ import annotations

import os
from pathlib import Path

from tinkex.cli.errors import CliError


def check_output(path: Path) -> Path:
    """Where to write, links followed; refused here if that cannot work, before any work."""
    final = path.resolve()
    if final.exists() and not final.is_file():
        raise CliError(f"--output must be a file, and {path} is none", "Name another.")
    nearest = next(parent for parent in final.parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CliError(
            f"{path} cannot be written: {nearest} is no directory that this user may write to",
            "Name another --output.",
        )
    return final
