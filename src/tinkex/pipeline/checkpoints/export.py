"""Export a trained model: a Hugging Face folder, and a single file of float16 weights."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from tinkex.pipeline.model import is_moe
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.system.atomic import new_directory, write_file_atomic

#: Base names of the single-file weights by stage.
LEGACY_NAMES: Mapping[str, str] = {
    "pretrain": "pretrain",
    "sft": "full_sft",
    "dpo": "rlhf",
    "r1": "reason",
}
#: Tokenizer files that are copied into the model folder.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json"),
)


def legacy_name(stage: str, config: PreTrainedConfig) -> str:
    """Return the file name of a stage's single-file weights."""
    suffix = "_moe" if is_moe(config) else ""
    return f"{LEGACY_NAMES[stage]}_{config.hidden_size}{suffix}.pth"


def write_legacy(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights as float16 atomically; tied weights stay tied."""
    halves: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    state_dict = {}
    for name, weight in weights.items():
        key = (weight.data_ptr(), tuple(weight.shape))
        if key not in halves:
            halves[key] = weight.detach().to("cpu", torch.float16)
        state_dict[name] = halves[key]
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    write_file_atomic(path, buffer.getvalue(), mode=0o644)


def export_folder(model: PreTrainedModel, tokenizer: TextTokenizer, directory: Path) -> None:
    """Write a model folder for transformers and the server atomically."""
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.end_of_turn, tokenizer.end_of_text],
        pad_token_id=tokenizer.end_of_text,
    )
    with new_directory(directory) as scratch:
        model.save_pretrained(scratch)
        for name in _TOKENIZER_FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, scratch / name)
