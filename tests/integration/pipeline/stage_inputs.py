"""Small tokenizers, data and models for tests of the stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tinkex.data import sample_rows
from tinkex.pipeline.model import ModelSizes, make_config, make_model
from tinkex.pipeline.settings_sources import parse_arguments
from tinkex.pipeline.stages import DataSplit, StageInputs
from tinkex.pipeline.token_file import TokenFile, open_token_file
from tinkex.pipeline.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer_folder
from tinkex.pipeline.train_settings import TrainSettings

SIZES = ModelSizes(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=96)
SIZE_WORDS = (
    *("--hidden_size", "32", "--num_layers", "2", "--num_heads", "4", "--num_kv_heads", "2"),
    *("--max_seq_len", "96"),
)
ROWS = {"pretrain": 80, "sft": 80, "dpo": 60, "r1": 60}


def write_samples(folder: Path, rows: Mapping[str, int] = ROWS) -> dict[str, Path]:
    """Write a few rows of sample data."""
    return sample_rows.write_sample_files(folder, 7, rows)


def make_tokenizer(folder: Path, data: Sequence[Path]) -> TextTokenizer:
    """Train a small tokenizer."""
    train_tokenizer_folder(data, folder, 400)
    return load_tokenizer(folder)


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_model(tokenizer: TextTokenizer, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Create a model with weights far from zero, so that every part affects the output."""
    sizes = ModelSizes(**{**{name: getattr(SIZES, name) for name in _NAMES}, **changes})
    config = make_config(sizes, tokenizer.vocab_size, tokenizer.end_of_turn, tokenizer.end_of_text)
    model = make_model(config, seed)
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=rng) * 0.05)
    return model


_NAMES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "max_seq_len")


def parse_args(stage: str, out: Path, data: Path, *words: str) -> TrainSettings:
    """Parse a trainer's command line."""
    parent = ("--init_from", str(out / "none")) if stage != "pretrain" else ()
    return parse_arguments(
        stage, ["--out_dir", str(out), "--data_path", str(data), *parent, *words]
    )


def all_rows(file: TokenFile) -> DataSplit:
    """Return a split of all rows."""
    return DataSplit(file, np.arange(file.num_rows))


def make_stage_inputs(
    stage: str, tmp: Path, data: Path, tokenizer: TextTokenizer, *words: str, **changes: Any
) -> StageInputs:
    """Build the inputs of a stage, with all rows in both splits."""
    split = all_rows(open_token_file(data, tokenizer, stage, tmp / "tokens"))
    return StageInputs(
        settings=parse_args(stage, tmp, data, "--max_seq_len", "96", "--batch_size", "4", *words),
        model=tiny_model(tokenizer, **changes),
        tokenizer=tokenizer,
        train=split,
        held_out=split,
        device=torch.device("cpu"),
    )
