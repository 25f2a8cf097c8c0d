"""What a stage starts from: its parent's result, or weights that were made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.digests import combine_file_digests, digest_weights, list_weight_files
from tinkex.pipeline.run.records import FileFingerprint, fingerprint_file, read_record, read_result
from tinkex.pipeline.run.stages import PRETRAIN, STAGES_BY_NAME, TOKENIZER, StageSpec
from tinkex.pipeline.steps import MODEL_FILE, latest_step

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
