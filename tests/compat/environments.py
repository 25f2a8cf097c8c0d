"""Virtual environments, one per version, kept in `.compat` between runs.

Each has the package itself, and what it needs in another version than this project's environment
has; the rest, torch above all, it takes from there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat"


class CannotInstall(Exception):
    """pip failed; the message is its last line."""


def python_of(name: str, requirements: Sequence[str], folder: Path = FOLDER) -> Path:
    """The interpreter of an environment with these requirements, which is made once."""
    home = folder / "environments" / name
    python, receipt = home / "bin" / "python", home / "requirements.txt"
    wanted = "\n".join([sysconfig.get_path("purelib"), *requirements])
    if receipt.exists() and receipt.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inherited = home / "lib" / version / "site-packages" / "inherited.pth"
    inherited.write_text(sysconfig.get_path("purelib") + "\n")
    install(python, requirements)
    receipt.write_text(wanted)
    return python


def install(python: Path, requirements: Sequence[str]) -> None:
    """Install with pip, which considers what is inherited as installed.

    Without bytecode: compiling thousands of modules takes longer than the few that are imported.
    """
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--no-compile", *requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotInstall("; ".join(complaint) or done.stderr[-300:])
