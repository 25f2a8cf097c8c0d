"""What a stage starts from: its parent's result, or weights that were made elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.rows import digest_file
from tinkex.pipeline.run.records import read_result
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


def result_digest(stage: Stage, out_dir: Path) -> str | None:
    """By what a stage's result is known; None if it has none."""
    folder = stage.model_dir(out_dir)
    if stage is TOKENIZER:
        return digest_file(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).exists() else None
    result = read_result(stage.directory(out_dir))
    return result.digest if result is not None and (folder / "config.json").exists() else None


def digest_weights(path: Path) -> str:
    """The digest of a .pth file, or of a folder's weights and configuration."""
    if path.is_file():
        return digest_file(path)
    files = sorted([*path.glob("*.safetensors"), *path.glob("*.bin"), path / "config.json"])
    found = [file for file in files if file.is_file()]
    if len(found) < 2:
        raise ConfigError(
            f"{path} is no model: it has no config.json beside weights",
            hint="Name a Hugging Face folder or a .pth file.",
        )
    digests = "".join(f"{file.name} {digest_file(file)}\n" for file in found)
    return hashlib.sha256(digests.encode()).hexdigest()


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
    digest = result_digest(parent, config.out_dir)
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
    if result_digest(PRETRAIN, out_dir) is not None:
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
