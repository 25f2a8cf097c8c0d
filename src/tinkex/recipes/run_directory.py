"""The directory of a run: what was planned, how far it got, and what was measured.

`plan.json` holds all settings and the digest of the data, `progress.json` the last saved state,
`metrics.jsonl` a line per step. A run that was killed at any moment goes on from these.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from tinkex.errors import InvalidInput
from tinkex.recipes.plan import describe_changes
from tinkex.system.atomic import remove_scratch, write_file_atomic
from tinkex.system.locks import lock_descriptor

_MODE = 0o644


class SavedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The last saved state; everything after it is done again."""

    step: int
    """How many steps the state has seen: with the seed it says which rows come next."""
    state_path: str
    """The tinker:// path of weights and optimizer."""
    reference_path: str | None = None
    """The weights that the run began with, where the recipe compares with them."""
    result: dict[str, Any] | None = None
    """Set when the run is over."""


class RunDirectory:
    """Reads and writes the directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plan_file = directory / "plan.json"
        self.progress_file = directory / "progress.json"
        self.metrics_file = directory / "metrics.jsonl"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the directory and keep other processes from training in it.

        A directory that is made here is removed again if the run fails before its first step.
        """
        made = _missing_directories(self.directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, _MODE)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidInput(f"{self.directory} cannot be used: {reason}") from error
        try:
            if not lock_descriptor(descriptor):
                raise InvalidInput(
                    f"another process is training in {self.directory}",
                    hint="Wait for it, or name another directory with --run-dir.",
                )
            remove_scratch(self.directory)
            yield
        except BaseException:
            if made and not self.metrics_file.exists() and not self.progress_file.exists():
                _remove_created(made)
            raise
        finally:
            os.close(descriptor)

    def find_changes(self, settings: Mapping[str, Any]) -> list[str]:
        """What differs from the plan that was begun, in words; nothing if nothing was saved."""
        begun = self._read_settings()
        if begun is None or self.read_progress() is None:
            return []
        return describe_changes(begun, settings)

    def write_plan(self, plan: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Write down the plan, in place of an older one."""
        _write_json(self.plan_file, {"plan": plan, "essence": settings})

    def clear_progress(self) -> None:
        """Forget how far the run got; checkpoints on the server stay."""
        self.progress_file.unlink(missing_ok=True)
        self.metrics_file.unlink(missing_ok=True)

    def read_progress(self) -> SavedProgress | None:
        """The last saved state, or None."""
        try:
            return msgspec.json.decode(self.progress_file.read_bytes(), type=SavedProgress)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InvalidInput(
                f"{self.progress_file} cannot be read: {error}",
                hint="Start over with --restart.",
            ) from error

    def write_progress(self, progress: SavedProgress) -> None:
        """Write down a saved state; seen whole or not at all."""
        _write_json(self.progress_file, progress)

    def _read_settings(self) -> dict[str, Any] | None:
        try:
            found = msgspec.json.decode(self.plan_file.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        essence = found.get("essence") if isinstance(found, dict) else None
        return essence if isinstance(essence, dict) else None

    # --- metrics ----------------------------------------------------------------------------

    def read_metrics(self) -> list[dict[str, Any]]:
        """What was measured so far; a line that a dying process left half is not there."""
        try:
            lines = self.metrics_file.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [row for row in map(_read_row, lines) if row is not None]

    def truncate_metrics(self, step: int) -> None:
        """Forget what was measured after a step: it will be done again."""
        by_step = {row["step"]: row for row in self.read_metrics() if row["step"] <= step}
        if by_step or self.metrics_file.exists():
            kept = [by_step[number] for number in sorted(by_step)]
            content = b"".join(msgspec.json.encode(row) + b"\n" for row in kept)
            write_file_atomic(self.metrics_file, content, _MODE)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add the figures of one step."""
        with self.metrics_file.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def _missing_directories(directory: Path) -> list[Path]:
    """A directory and its parents that do not exist, innermost first."""
    return list(takewhile(lambda path: not path.exists(), (directory, *directory.parents)))


def _remove_created(made: Sequence[Path]) -> None:
    """Remove a directory with its content, and its parents if they are empty."""
    shutil.rmtree(made[0], ignore_errors=True)
    with suppress(OSError):
        for parent in made[1:]:
            parent.rmdir()


def _read_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _write_json(path: Path, content: Any) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    write_file_atomic(path, encoded + b"\n", _MODE)
