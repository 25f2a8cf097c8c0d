"""`stage.json`: what became of a stage, what it was made from, and of which parent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from tinkex.data.jsonl import digest_file
from tinkex.errors import CheckpointError, ConfigError
from tinkex.pipeline.checkpoints.model_digest import (
    combine_file_digests,
    digest_weights,
    list_weight_files,
)
from tinkex.pipeline.checkpoints.step_directory import MODEL_FILE, latest_step
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.stage_specs import PRETRAIN, STAGES_BY_NAME, TOKENIZER, StageSpec
from tinkex.system.atomic import write_file_atomic
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


TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """Where a stage begins."""

    parent: str | None = None
    """A stage's name, or the path of weights from elsewhere."""
    digest: str | None = None
    weights: Path | None = None
    """What the trainer loads; None makes new weights."""


def fingerprint_result(stage: StageSpec, out_dir: Path) -> list[FileFingerprint]:
    """The files of a stage's result as they are now; none if it has no result."""
    record = read_record(stage.directory(out_dir))
    known = record.result if record is not None else ()
    return [fingerprint_file(path, known) for path in _result_files(stage, out_dir)]


def _result_files(stage: StageSpec, out_dir: Path) -> list[Path]:
    folder = stage.model_dir(out_dir)
    if stage is TOKENIZER:
        path = folder / TOKENIZER_FILE
        return [path] if path.exists() else []
    return list_weight_files(folder)


def result_digest(files: Sequence[FileFingerprint]) -> str | None:
    """By what a result is known; None if there is none."""
    if not files:
        return None
    return combine_file_digests((Path(file.path).name, file.sha256) for file in files)


def reported_digest(stage: StageSpec, out_dir: Path) -> str | None:
    """By what a result is known according to its trainer: no weights are read for it."""
    if stage is TOKENIZER:
        return result_digest(fingerprint_result(stage, out_dir))
    result = read_result(stage.directory(out_dir))
    return result.digest if result is not None and _result_files(stage, out_dir) else None


def resolve_start(stage: StageSpec, config: PipelineConfig, *, skip_pretrain: bool) -> StageStart:
    """Where a stage begins; what it needs must be there by now."""
    if stage.parent is None:
        return StageStart()
    parent = STAGES_BY_NAME[stage.parent]
    if parent is PRETRAIN and skip_pretrain:
        path = find_external_start(config)
        # The result of a pretrain is the same start, whether it is looked at or left out.
        if path != PRETRAIN.model_dir(config.out_dir):
            return StageStart(parent=str(path), digest=digest_weights(path), weights=path)
    digest = result_digest(fingerprint_result(parent, config.out_dir))
    if digest is None:
        raise ConfigError(
            f"{stage.name} starts from {parent.name}, which has no result in {config.out_dir}"
        )
    weights = None if parent is TOKENIZER else parent.model_dir(config.out_dir)
    return StageStart(parent=parent.name, digest=digest, weights=weights)


def find_external_start(config: PipelineConfig) -> Path:
    """What SFT starts from when pretrain is left out: what is named, else what is in OUT_DIR."""
    if config.pretrained_path is not None:
        if not config.pretrained_path.exists():
            raise ConfigError(f"PRETRAINED_PATH names {config.pretrained_path}, which is not there")
        return config.pretrained_path
    out_dir = config.out_dir
    folder = PRETRAIN.model_dir(out_dir)
    if fingerprint_result(PRETRAIN, out_dir):
        return folder
    step_dir = latest_step(PRETRAIN.checkpoint_dir(out_dir))
    if step_dir is not None:
        return step_dir / MODEL_FILE
    legacy = out_dir / f"{PRETRAIN.legacy_prefix}_{config.hidden_size}{_moe_suffix(config)}.pth"
    if legacy.exists():
        return legacy
    raise ConfigError(
        f"there is nothing to start SFT from: {out_dir} has no pretrain",
        hint="Leave out --skip-pretrain, or set PRETRAINED_PATH to a model folder or .pth file.",
    )


def find_tokenizer(config: PipelineConfig, *, skip_pretrain: bool) -> Path:
    """The folder of the tokenizer: that of the weights it starts from, or the one of this run."""
    own = TOKENIZER.model_dir(config.out_dir)
    if not skip_pretrain:
        return own
    start = find_external_start(config)
    for folder in (start, start.parent, own):
        if (folder / TOKENIZER_FILE).is_file():
            return folder
    raise ConfigError(
        f"there is no tokenizer for {start}", hint=f"Put its {TOKENIZER_FILE} beside it."
    )


def _moe_suffix(config: PipelineConfig) -> str:
    return "_moe" if config.use_moe else ""
