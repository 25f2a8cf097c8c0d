"""Records of stages: status, inputs and results in stage.json and result.json."""

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
    """Status of a stage."""

    RUNNING = "running"  #: its trainer was started and has not finished
    COMPLETE = "complete"  #: its result exists
    FAILED = "failed"  #: its trainer failed
    INTERRUPTED = "interrupted"  #: a signal stopped it


class StageAction(StrEnum):
    """Action for a stage in a run."""

    SKIP = "skipped"  #: complete, with unchanged inputs
    START = "trained"  #: no checkpoint to resume from
    RESUME = "resumed"  #: a step checkpoint exists
    STOP = "refused"  #: the inputs changed, and no restart was requested


class FileFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A file and its digest; it is read again if size or time changed."""

    path: str
    size: int
    modified_ns: int
    sha256: str


class StageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of stage.json."""

    stage: str
    status: StageStatus
    config: dict[str, str]
    """Settings that determine the result, apart from the parent."""
    config_hash: str
    parent: str | None = None
    """The stage, folder or file the stage started from."""
    parent_digest: str | None = None
    data: list[FileFingerprint] = []
    command: list[str] = []
    pid: int | None = None
    """Process id of the running trainer."""
    started_at: str | None = None
    finished_at: str | None = None
    exit_code: int | None = None
    result: list[FileFingerprint] = []
    """Files of the result when the stage completed."""
    digest: str | None = None
    """Digest of the result."""


class MetricChange(msgspec.Struct, frozen=True):
    """A metric on the eval split before and after training."""

    before: float | None = None
    after: float | None = None


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """Content of result.json, which a trainer writes at its end."""

    stage: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, MetricChange] = {}
    """Metrics by name, the main one first."""
    digest: str


def fingerprint_file(path: Path, known: Sequence[FileFingerprint] = ()) -> FileFingerprint:
    """Return a file with its digest; unchanged known files are not read again."""
    try:
        stat = path.stat()
        for file in known:
            fingerprint = (file.path, file.size, file.modified_ns)
            if fingerprint == (str(path), stat.st_size, stat.st_mtime_ns):
                return file
        digest = digest_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return FileFingerprint(
        path=str(path), size=stat.st_size, modified_ns=stat.st_mtime_ns, sha256=digest
    )


def combine_digests(files: Sequence[FileFingerprint]) -> str:
    """Combine the digests of several files in order."""
    if len(files) == 1:
        return files[0].sha256
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def hash_config(config: dict[str, str]) -> str:
    """Return the hash of a configuration, independent of the field order."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def write_record(directory: Path, record: StageRecord) -> None:
    """Write stage.json atomically."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    write_file_atomic(directory / RECORD_NAME, text + b"\n", mode=0o644)


def read_record(directory: Path) -> StageRecord | None:
    """Read stage.json; None if it does not exist."""
    return _read_json(directory / RECORD_NAME, StageRecord)


def read_result(directory: Path) -> StageResult | None:
    """Read result.json; None if it does not exist."""
    return _read_json(directory / RESULT_NAME, StageResult)


def _read_json(path: Path, kind: type[T]) -> T | None:
    try:
        # The json module accepts NaN in metrics; msgspec does not.
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
    """Initial weights of a stage."""

    parent: str | None = None
    """A stage name, or the path of external weights."""
    digest: str | None = None
    weights: Path | None = None
    """Weights for the trainer to load; None means random weights."""


def fingerprint_result(stage: StageSpec, out_dir: Path) -> list[FileFingerprint]:
    """Return the current result files of a stage; empty if it has no result."""
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
    """Return the digest of a result, or None if there is none."""
    if not files:
        return None
    return combine_file_digests((Path(file.path).name, file.sha256) for file in files)


def reported_digest(stage: StageSpec, out_dir: Path) -> str | None:
    """Return the digest that the trainer recorded, without reading the weights."""
    if stage is TOKENIZER:
        return result_digest(fingerprint_result(stage, out_dir))
    result = read_result(stage.directory(out_dir))
    return result.digest if result is not None and _result_files(stage, out_dir) else None


def resolve_start(stage: StageSpec, config: PipelineConfig, *, skip_pretrain: bool) -> StageStart:
    """Return the initial weights of a stage; raises ConfigError if they do not exist."""
    if stage.parent is None:
        return StageStart()
    parent = STAGES_BY_NAME[stage.parent]
    if parent is PRETRAIN and skip_pretrain:
        path = find_external_start(config)
        # The result of this pipeline's pretrain stage is recorded by stage name below.
        if path != PRETRAIN.model_dir(config.out_dir):
            return StageStart(parent=str(path), digest=digest_weights(path), weights=path)
    digest = result_digest(fingerprint_result(parent, config.out_dir))
    if digest is None:
        raise ConfigError(
            f"{stage.name} needs the result of {parent.name}, which is missing in {config.out_dir}"
        )
    weights = None if parent is TOKENIZER else parent.model_dir(config.out_dir)
    return StageStart(parent=parent.name, digest=digest, weights=weights)


def find_external_start(config: PipelineConfig) -> Path:
    """Return the initial weights of SFT without pretrain: PRETRAINED_PATH, else from OUT_DIR."""
    if config.pretrained_path is not None:
        if not config.pretrained_path.exists():
            raise ConfigError(f"PRETRAINED_PATH: {config.pretrained_path} does not exist")
        return config.pretrained_path
    out_dir = config.out_dir
    folder = PRETRAIN.model_dir(out_dir)
    if fingerprint_result(PRETRAIN, out_dir):
        return folder
    step_dir = latest_step(PRETRAIN.checkpoint_dir(out_dir))
    if step_dir is not None:
        return step_dir / MODEL_FILE
    settings = config.settings()
    suffix = "_moe" if settings.use_moe else ""
    legacy = out_dir / f"{PRETRAIN.legacy_prefix}_{settings.hidden_size}{suffix}.pth"
    if legacy.exists():
        return legacy
    raise ConfigError(
        f"no weights to start SFT from: {out_dir} has no pretrain result",
        hint="Omit --skip-pretrain, or set PRETRAINED_PATH to a model folder or .pth file.",
    )


def find_tokenizer(config: PipelineConfig, *, skip_pretrain: bool) -> Path:
    """Return the tokenizer folder: that of the initial weights, or of this run."""
    own = TOKENIZER.model_dir(config.out_dir)
    if not skip_pretrain:
        return own
    start = find_external_start(config)
    for folder in (start, start.parent, own):
        if (folder / TOKENIZER_FILE).is_file():
            return folder
    raise ConfigError(f"no tokenizer for {start}", hint=f"Put its {TOKENIZER_FILE} next to it.")
