"""The command lines by which stages are started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.arguments import Arguments, to_words
from tinkex.pipeline.run.stages import TOKENIZER, Stage

#: Beside `src` in the project.
_PROJECT_TRAINERS = Path(__file__).resolve().parents[4] / "trainer"


def train_command(stage: Stage, arguments: Arguments, config: PipelineConfig) -> list[str]:
    """What trains a stage; with several processes, torchrun starts them."""
    script = trainer_of(stage, config)
    if config.num_processes == 1:
        return [sys.executable, *script, *to_words(arguments)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    count = f"--nproc_per_node={config.num_processes}"
    return [*launcher, count, *script, *to_words(arguments)]


def trainer_of(stage: Stage, config: PipelineConfig) -> list[str]:
    """The trainer's script, or its module where only the package is installed."""
    directory = config.trainer_dir or _PROJECT_TRAINERS
    script = directory / stage.trainer
    if script.is_file():
        return [_as_seen(script)]
    if config.trainer_dir is not None:
        raise ConfigError(f"there is no {stage.trainer} in {directory}, which TRAINER_DIR names")
    return ["-m", "tinkex.pipeline.run.trainer", stage.name]


def tokenizer_command(data: Sequence[Path], folder: Path, vocab_size: int) -> list[str]:
    """What trains the tokenizer."""
    words = ["--data", *map(str, data), "--out", str(folder), "--vocab_size", str(vocab_size)]
    return [sys.executable, "-m", TOKENIZER.trainer, *words]


def _as_seen(script: Path) -> str:
    """A path as a person in this directory would write it."""
    try:
        return str(script.relative_to(Path.cwd()))
    except ValueError:
        return str(script)
