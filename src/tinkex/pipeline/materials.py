"""From a command line to a stage: tokenizer, token files, model, device, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tinkex.errors import ConfigError, InvalidInput
from tinkex.logs import get_logger
from tinkex.pipeline import tokenizer as tokenizers
from tinkex.pipeline.arguments import Arguments
from tinkex.pipeline.data.batches import useful_rows
from tinkex.pipeline.data.packing import hold_out
from tinkex.pipeline.data.tokens import TokenFile, open_tokens
from tinkex.pipeline.digests import digest_weights
from tinkex.pipeline.distributed import Ranks
from tinkex.pipeline.model import (
    check_sizes,
    check_there,
    load_model,
    make_config,
    make_model,
    sizes_of,
)
from tinkex.pipeline.stages.base import Part, Setting
from tinkex.pipeline.stages.distill import DistillStage
from tinkex.pipeline.stages.dpo import DpoStage
from tinkex.pipeline.stages.pretrain import PretrainStage
from tinkex.pipeline.stages.sft import SftStage
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.units import format_count

LOG = get_logger(__name__)
#: Below out_dir: rows as tokens, made once.
TOKENS_DIR = "tokens"
Made = TypeVar("Made")


def make_stage(name: str, known: Arguments, ranks: Ranks) -> PretrainStage | DpoStage:
    """A stage that is ready to be trained."""
    if known.init_from is not None:
        check_there(known.init_from)
    device = choose_device(known.device, ranks.local_rank)
    tokenizer = _first_then_all(ranks, lambda: open_tokenizer(known))
    train, held_out = _first_then_all(ranks, lambda: open_parts(name, known, tokenizer))
    model, parent = open_model(known, tokenizer)
    setting = Setting(
        arguments=known,
        model=_moved(model, device),
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        device=device,
        dtype=choose_dtype(known.dtype, device),
        parent=parent,
    )
    stage = _MAKERS[name](setting)
    if ranks.is_first:
        _tell_lost(stage, known)
    return stage


def _tell_lost(stage: PretrainStage | DpoStage, known: Arguments) -> None:
    """Say what of the data is too long to be learned."""
    source = stage.source
    if source.num_shortened:
        LOG.warning(
            "%d conversations of %s are longer than --max_seq_len %d and lose their end",
            *(source.num_shortened, known.data_path, known.max_seq_len),
        )
    if source.num_dropped:
        LOG.warning(
            "%d rows of %s have nothing to learn from within %d tokens, and are left out",
            *(source.num_dropped, known.data_path, known.max_seq_len),
        )


def _first_then_all(ranks: Ranks, make: Callable[[], Made]) -> Made:
    """Files are made by the first rank and found by the others, not made by all at once."""
    made: list[Made] = []
    ranks.from_first(lambda: made.append(make()))
    return made[0] if made else make()


def _make_dpo(setting: Setting) -> DpoStage:
    path = setting.arguments.ref_path
    if path is None:
        return DpoStage(setting, None)
    reference = load_model(path, setting.model.config)
    _check_vocabulary(reference, setting.tokenizer, path)
    return DpoStage(setting, _moved(reference, setting.device), digest_weights(path))


def _make_distill(setting: Setting) -> DistillStage:
    path = setting.arguments.teacher
    if path is None:
        return DistillStage(setting, None)
    teacher = load_model(path, setting.model.config)
    return DistillStage(setting, _moved(teacher, setting.device), digest_weights(path))


_MAKERS: Mapping[str, Callable[[Setting], PretrainStage | DpoStage]] = {
    "pretrain": PretrainStage,
    "sft": SftStage,
    "dpo": _make_dpo,
    "r1": _make_distill,
}


# --- tokens ---------------------------------------------------------------------------------


def open_tokenizer(known: Arguments) -> TextTokenizer:
    """The tokenizer that is named, or the parent's, or a new one for the data."""
    if known.tokenizer_dir is not None:
        return tokenizers.load(known.tokenizer_dir)
    if known.init_from is not None and (known.init_from / tokenizers.FILE).is_file():
        return tokenizers.load(known.init_from)
    if known.init_from is not None:
        raise ConfigError(
            f"{known.init_from} has no tokenizer", hint="Name its folder with --tokenizer_dir."
        )
    folder = known.out_dir / "tokenizer"
    tokenizers.train_folder([known.data_path], folder, known.vocab_size)
    return tokenizers.load(folder)


def open_parts(name: str, known: Arguments, tokenizer: TextTokenizer) -> tuple[Part, Part]:
    """Rows to train on and rows to evaluate on."""
    cache = known.out_dir / TOKENS_DIR
    file = open_tokens(known.data_path, tokenizer, name, cache, known.limit)
    is_useful = _find_useful(known.data_path, file, known.max_seq_len)
    if known.eval_data_path is not None:
        other = open_tokens(known.eval_data_path, tokenizer, name, cache, known.eval_samples)
        _find_useful(known.eval_data_path, other, known.max_seq_len)
        return Part(file, np.arange(file.num_rows)), Part(other, np.arange(other.num_rows))
    train, held = hold_out(file.row_digests, known.eval_samples, known.seed, is_useful)
    if not is_useful[train].any():
        raise InvalidInput(
            f"{known.data_path} has {format_count(int(is_useful.sum()), 'row')} to learn from, "
            "and none is left to train on when one is held out",
            hint="Add rows that differ, or name other data with --eval_data_path.",
        )
    return Part(file, train), Part(file, held)


def _find_useful(path: Path, file: TokenFile, max_length: int) -> npt.NDArray[np.bool_]:
    """Which rows have something to learn from; a file that has none is refused."""
    found = useful_rows(file, max_length)
    if not found.any():
        raise InvalidInput(
            f"{path}: no row has anything to learn from within its first {max_length} tokens",
            hint="Raise --max_seq_len, or use shorter rows.",
        )
    return found


# --- the model ------------------------------------------------------------------------------


def open_model(known: Arguments, tokenizer: TextTokenizer) -> tuple[PreTrainedModel, str]:
    """The model to train, and the digest of its start weights (empty if they are random)."""
    parent = known.init_from
    if parent is None:
        return make_model(_blank(known, tokenizer), known.seed), ""
    model = load_model(parent, None if parent.is_dir() else _blank(known, tokenizer))
    check_sizes(model.config, known, parent)
    _check_vocabulary(model, tokenizer, parent)
    config = model.config
    config.max_position_embeddings = max(config.max_position_embeddings, known.max_seq_len)
    return model, digest_weights(parent)


def _blank(known: Arguments, tokenizer: TextTokenizer) -> PreTrainedConfig:
    return make_config(
        sizes_of(known), tokenizer.vocab_size, tokenizer.end_of_turn, tokenizer.end_of_text
    )


def _check_vocabulary(model: PreTrainedModel, tokenizer: TextTokenizer, path: Path) -> None:
    size = model.config.vocab_size
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"the tokenizer in {tokenizer.folder} has {tokenizer.vocab_size} tokens, but the model "
            f"in {path} knows {size}",
            hint="Use the tokenizer that the model was made with.",
        )


# --- where to compute -----------------------------------------------------------------------


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Where to compute; each rank has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device is {name!r}, which cannot be used here: {str(error).partition(chr(10))[0]}",
            hint="Use --device auto or cpu.",
        ) from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """What to compute with: bfloat16 only where the hardware has it, said if it was asked for."""
    has_it = has_bfloat16(device)
    if name == "bfloat16" and not has_it:
        LOG.warning("bfloat16 is slow on this %s, so float32 is used", device.type)
    wants_it = name == "bfloat16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if wants_it and has_it else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware computes with bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False


def _moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved
