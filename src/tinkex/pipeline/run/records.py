"""`stage.json`: what became of a stage, what it was made from, and of which parent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from tinkex.checkpoint.atomic import write_file_atomic
from tinkex.data.jsonl import digest_file
from tinkex.errors import CheckpointError, ConfigError
from tinkex.types.base import preload_type

T = TypeVar("T")
RECORD_NAME = "stage.json"
RESULT_NAME = "result.json"


class StageStatus(StrEnum):
    """Where a stage is in its life."""

    RUNNING = "running"  #: its trainer was started, and nobody has written how it ended
    COMPLETE = "complete"  #: its result is there
    FAILED = "failed"  #: its trainer gave up
    INTERRUPTED = "interrupted"  #: somebody stopped it


class FileFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was read; size and time tell whether it must be read again."""

    path: str
    size: int
    modified_ns: int
    sha256: str


class StageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that is remembered about a stage."""

    stage: str
    status: StageStatus
    config: dict[str, str]
    """What its result follows from, apart from its parent."""
    config_hash: str
    parent: str | None = None
    """The stage, folder or file it started from."""
    parent_digest: str | None = None
    data: list[FileFingerprint] = []
    command: list[str] = []
    pid: int | None = None
    """The trainer, while it runs."""
    started_at: str | None = None
    finished_at: str | None = None
    exit_code: int | None = None
    result: list[FileFingerprint] = []
    """The files of its result, as they were when it was complete."""
    digest: str | None = None
    """Of its result."""


class MetricChange(msgspec.Struct, frozen=True):
    """A metric on held-out data."""

    before: float | None = None
    after: float | None = None


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """`result.json`, which a trainer leaves at its end."""

    stage: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, MetricChange] = {}
    """By name; the first is the stage's own."""
    digest: str


def fingerprint_file(path: Path, known: Sequence[FileFingerprint] = ()) -> FileFingerprint:
    """A file with its digest; one that is known and untouched is not read again."""
    try:
        stat = path.stat()
        for file in known:
            same = (file.path, file.size, file.modified_ns)
            if same == (str(path), stat.st_size, stat.st_mtime_ns):
                return file
        digest = digest_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return FileFingerprint(
        path=str(path), size=stat.st_size, modified_ns=stat.st_mtime_ns, sha256=digest
    )


def combine_digests(files: Sequence[FileFingerprint]) -> str:
    """One digest for several files, in their order."""
    if len(files) == 1:
        return files[0].sha256
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def hash_config(config: dict[str, str]) -> str:
    """One word for a configuration, whatever the order of its fields."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def write_record(directory: Path, record: StageRecord) -> None:
    """Write a stage's record, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    write_file_atomic(directory / RECORD_NAME, text + b"\n", mode=0o644)


def read_record(directory: Path) -> StageRecord | None:
    """A stage's record; None if there is none."""
    return _read_json(directory / RECORD_NAME, StageRecord)


def read_result(directory: Path) -> StageResult | None:
    """What a trainer left at its end; None if it has not come so far."""
    return _read_json(directory / RESULT_NAME, StageResult)


def _read_json(path: Path, kind: type[T]) -> T | None:
    try:
        # Python's own reader: a metric that is no number is told as NaN, which msgspec refuses.
        return msgspec.convert(json.loads(path.read_bytes()), preload_type(kind))
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            hint=f"Remove it, or run again with --restart-from {path.parent.name}.",
        ) from None
