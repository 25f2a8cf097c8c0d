"""What a stage starts from: its parent's result, or weights that were made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.digests import combine_named, digest_weights, weight_files
from tinkex.pipeline.run.records import DataFile, describe_data, read_record, read_result
from tinkex.pipeline.run.stages import BY_NAME, PRETRAIN, TOKENIZER, Stage
from tinkex.pipeline.steps import MODEL_FILE, latest_step

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a stage begins."""

    parent: str | None = None
    """A stage's name, or the path of weights from elsewhere."""
    digest: str | None = None
    weights: Path | None = None
    """What the trainer loads; None makes new weights."""


def describe_result(stage: Stage, out_dir: Path) -> list[DataFile]:
    """The files of a stage's result as they are now; none if it has no result."""
    record = read_record(stage.directory(out_dir))
    known = record.result if record is not None else ()
    return [describe_data(path, known) for path in _result_files(stage, out_dir)]


def _result_files(stage: Stage, out_dir: Path) -> list[Path]:
    folder = stage.model_dir(out_dir)
    if stage is TOKENIZER:
        path = folder / TOKENIZER_FILE
        return [path] if path.exists() else []
    return weight_files(folder)


def result_digest(files: Sequence[DataFile]) -> str | None:
    """By what a result is known; None if there is none."""
    if not files:
        return None
    return combine_named((Path(file.path).name, file.sha256) for file in files)


def told_digest(stage: Stage, out_dir: Path) -> str | None:
    """By what a result is known according to its trainer: no weights are read for it."""
    if stage is TOKENIZER:
        return result_digest(describe_result(stage, out_dir))
    result = read_result(stage.directory(out_dir))
    return result.digest if result is not None and _result_files(stage, out_dir) else None


def start_of(stage: Stage, config: PipelineConfig, *, skip_pretrain: bool) -> Start:
    """Where a stage begins; what it needs must be there by now."""
    if stage.parent is None:
        return Start()
    parent = BY_NAME[stage.parent]
    if parent is PRETRAIN and skip_pretrain:
        path = outside_start(config)
        # The result of a pretrain is the same start, whether it is looked at or left out.
        if path != PRETRAIN.model_dir(config.out_dir):
            return Start(parent=str(path), digest=digest_weights(path), weights=path)
    digest = result_digest(describe_result(parent, config.out_dir))
    if digest is None:
        raise ConfigError(
            f"{stage.name} starts from {parent.name}, which has no result in {config.out_dir}"
        )
    weights = None if parent is TOKENIZER else parent.model_dir(config.out_dir)
    return Start(parent=parent.name, digest=digest, weights=weights)


def outside_start(config: PipelineConfig) -> Path:
    """What SFT starts from when pretrain is left out: what is named, else what is in OUT_DIR."""
    if config.pretrained_path is not None:
        if not config.pretrained_path.exists():
            raise ConfigError(f"PRETRAINED_PATH names {config.pretrained_path}, which is not there")
        return config.pretrained_path
    out_dir = config.out_dir
    folder = PRETRAIN.model_dir(out_dir)
    if describe_result(PRETRAIN, out_dir):
        return folder
    step_dir = latest_step(PRETRAIN.checkpoint_dir(out_dir))
    if step_dir is not None:
        return step_dir / MODEL_FILE
    legacy = out_dir / f"{PRETRAIN.legacy}_{config.hidden_size}{_suffix(config)}.pth"
    if legacy.exists():
        return legacy
    raise ConfigError(
        f"there is nothing to start SFT from: {out_dir} has no pretrain",
        hint="Leave out --skip-pretrain, or set PRETRAINED_PATH to a model folder or .pth file.",
    )


def tokenizer_of(config: PipelineConfig, *, skip_pretrain: bool) -> Path:
    """The folder of the tokenizer: that of the weights it starts from, or the one of this run."""
    own = TOKENIZER.model_dir(config.out_dir)
    if not skip_pretrain:
        return own
    start = outside_start(config)
    for folder in (start, start.parent, own):
        if (folder / TOKENIZER_FILE).is_file():
            return folder
    raise ConfigError(
        f"there is no tokenizer for {start}", hint=f"Put its {TOKENIZER_FILE} beside it."
    )


def _suffix(config: PipelineConfig) -> str:
    return "_moe" if config.use_moe else ""
