"""The official command line, `tinker`, in processes that start at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.forkserver import forks_of

#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 180.0


def official_forks() -> Any:
    """A process that has imported the command and forks; it ends with this one."""
    return forks_of("tinker.cli.__main__", "tinker", __name__)


class Answer(NamedTuple):
    """What a command printed."""

    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The `tinker` command of one user, in a directory of their own.

    It takes seconds to be imported. So a process imports it once, and every call is a fork of it.
    """

    forks: Any
    directory: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str, status: int = 0) -> Answer:
        """Run it; it must end with this status."""
        paths = self.directory / "stdout", self.directory / "stderr"
        process = self.forks.Process(
            target=run_there, args=(arguments, self.environment, self.directory, paths)
        )
        process.start()
        process.join(TIMEOUT_SECONDS)
        process.kill()
        answer = Answer(*(path.read_text() for path in paths))
        told = f"tinker {' '.join(arguments)} ended with {process.exitcode}: {answer}"
        assert process.exitcode == status, told
        return answer

    def json(self, *arguments: str) -> Any:
        """What it prints for programs."""
        return json.loads(self("-f", "json", *arguments).stdout)


def run_there(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    paths: Sequence[Path],
) -> None:
    """Runs in the fork: become the command, as its script would."""
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = ["tinker", *arguments]
    metadata.entry_points(group="console_scripts")["tinker"].load()()
