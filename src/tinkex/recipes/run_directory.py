"""The directory of a run: plan, progress and metrics.

`plan.json` contains all settings and the digest of the data, `progress.json` the last saved state,
`metrics.jsonl` a line per step. A run that is killed at any moment can resume from them.
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
    """The last saved state; later steps are repeated on resume."""

    step: int
    """Number of finished steps; together with the seed it determines the next rows."""
    state_path: str
    """tinker:// path of weights and optimizer state."""
    reference_path: str | None = None
    """Path of the reference weights, if the recipe needs them."""
    result: dict[str, Any] | None = None
    """The result, once the run is complete."""
    checkpoints: tuple[str, ...] = ()
    """Paths of the saved states that are not deleted yet, oldest first."""


class RunDirectory:
    """Reads and writes the directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plan_file = directory / "plan.json"
        self.progress_file = directory / "progress.json"
        self.metrics_file = directory / "metrics.jsonl"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create and lock the directory.

        A directory created here is removed again if the run fails before its first step.
        """
        created = _missing_directories(self.directory)
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
                    hint="Wait for it, or choose another directory with --run-dir.",
                )
            remove_scratch(self.directory)
            yield
        except BaseException:  # also on Ctrl-C
            if created and not self.metrics_file.exists() and not self.progress_file.exists():
                _remove_created(created)
            raise
        finally:
            os.close(descriptor)

    def find_changes(self, settings: Mapping[str, object]) -> list[str]:
        """Describe changes to the recorded settings; empty if nothing was saved yet."""
        recorded = self._read_settings()
        if recorded is None or self.read_progress() is None:
            return []
        return describe_changes(recorded, settings)

    def write_plan(self, plan: Mapping[str, object], settings: Mapping[str, object]) -> None:
        """Write plan.json, replacing an older one."""
        _write_json(self.plan_file, {"plan": plan, "essence": settings})

    def clear_progress(self) -> None:
        """Delete progress and metrics; checkpoints on the server stay."""
        self.progress_file.unlink(missing_ok=True)
        self.metrics_file.unlink(missing_ok=True)

    def read_progress(self) -> SavedProgress | None:
        """Return the last saved state, or None."""
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
        """Write progress.json atomically."""
        _write_json(self.progress_file, progress)

    def _read_settings(self) -> dict[str, object] | None:
        try:
            content = msgspec.json.decode(self.plan_file.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        settings = content.get("essence") if isinstance(content, dict) else None
        return settings if isinstance(settings, dict) else None

    # --- metrics ----------------------------------------------------------------------------

    def read_metrics(self) -> list[dict[str, object]]:
        """Return the logged metrics; a truncated last line is dropped."""
        try:
            lines = self.metrics_file.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [row for row in map(_read_row, lines) if row is not None]

    def truncate_metrics(self, step: int) -> None:
        """Drop the metrics after a step, which will be repeated."""
        by_step = {
            number: row
            for row in self.read_metrics()
            if isinstance(number := row["step"], int) and number <= step
        }
        if by_step or self.metrics_file.exists():
            rows = [by_step[number] for number in sorted(by_step)]
            content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
            write_file_atomic(self.metrics_file, content, _MODE)

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Append the metrics of one step."""
        with self.metrics_file.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def _missing_directories(directory: Path) -> list[Path]:
    """Return a directory and its parents that do not exist, innermost first."""
    return list(takewhile(lambda path: not path.exists(), (directory, *directory.parents)))


def _remove_created(created: Sequence[Path]) -> None:
    """Remove a directory with its content, and its parents if they are empty."""
    shutil.rmtree(created[0], ignore_errors=True)
    with suppress(OSError):
        for parent in created[1:]:
            parent.rmdir()


def _read_row(line: bytes) -> dict[str, object] | None:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _write_json(path: Path, content: object) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    write_file_atomic(path, encoded + b"\n", _MODE)
