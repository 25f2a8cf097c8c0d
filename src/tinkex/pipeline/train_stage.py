"""Build a stage from its settings, train it and write its result.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_log

from tinkex.display import format_count
from tinkex.errors import ConfigError, InvalidInput
from tinkex.logs import get_logger
from tinkex.nn.ranks import DistributedContext, init_distributed
from tinkex.pipeline import tokenizer as tokenizers
from tinkex.pipeline.batches import find_trainable_rows
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.model import (
    check_model_exists,
    check_sizes,
    choose_device,
    choose_dtype,
    load_model,
    make_config,
    make_model,
    model_sizes,
)
from tinkex.pipeline.output_locks import lock_directory
from tinkex.pipeline.stage_interface import TrainResult
from tinkex.pipeline.stages import (
    DataSplit,
    DistillStage,
    DpoStage,
    PretrainStage,
    SftStage,
    StageInputs,
)
from tinkex.pipeline.token_file import TokenFile, open_token_file, split_held_out
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.pipeline.train.loop import EXPORT_NAME, train
from tinkex.pipeline.train.metrics import ConsoleSink, make_sink
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.system.atomic import remove_scratch, write_file_atomic

LOG = get_logger(__name__)
#: Subdirectory of out_dir for the token files.
TOKENS_DIR = "tokens"
RESULT_FILE = "result.json"
ResultT = TypeVar("ResultT")


def run(stage_name: str, settings: TrainSettings) -> int:
    """Train a stage; returns the exit code: 0, or 128 + the signal number."""
    # Its progress bars would garble the metric lines.
    transformers_log.disable_progress_bar()
    try:
        with init_distributed() as ranks, ExitStack() as stack:
            ranks.run_on_rank_zero(lambda: _lock_output_dir(settings.out_dir, stack))
            return _train(stage_name, settings, ranks)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error).partition("\n")[0]) from error


def _lock_output_dir(out_dir: Path, stack: ExitStack) -> None:
    """Lock the output directory and remove temporary files of a trainer that died."""
    stack.enter_context(lock_directory(out_dir))
    for folder in (out_dir, out_dir / TOKENS_DIR):
        remove_scratch(folder)


def _train(stage_name: str, settings: TrainSettings, ranks: DistributedContext) -> int:
    stage = build_stage(stage_name, settings, ranks)
    result = train(stage, settings, sink=make_sink(stage_name, settings))
    if not ranks.is_rank_zero:
        return result.exit_code
    if result.is_complete:
        write_result(result, settings.out_dir)
        ConsoleSink(stage_name).write_line(summarize_result(result))
    return result.exit_code


def build_stage(
    stage_name: str, settings: TrainSettings, ranks: DistributedContext
) -> PretrainStage | DpoStage:
    """Build a stage that is ready for training."""
    if settings.init_from is not None:
        check_model_exists(settings.init_from)
    device = choose_device(settings.device, ranks.local_rank)
    tokenizer = _rank_zero_first(ranks, lambda: load_or_train_tokenizer(settings))
    train, held_out = _rank_zero_first(ranks, lambda: open_splits(stage_name, settings, tokenizer))
    model, parent = load_or_create_model(settings, tokenizer)
    inputs = StageInputs(
        settings=settings,
        model=_to_device(model, device),
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        device=device,
        dtype=choose_dtype(settings.dtype, device),
        parent=parent,
    )
    stage = _STAGE_BUILDERS[stage_name](inputs)
    if ranks.is_rank_zero:
        _warn_truncated_rows(stage, settings)
    return stage


def _warn_truncated_rows(stage: PretrainStage | DpoStage, settings: TrainSettings) -> None:
    """Warn about rows that are truncated or dropped because they are too long."""
    source = stage.source
    if source.num_shortened:
        LOG.warning(
            "%d conversations of %s are longer than --max_seq_len %d and are truncated",
            *(source.num_shortened, settings.data_path, settings.max_seq_len),
        )
    if source.num_dropped:
        LOG.warning(
            "%d rows of %s have no targets within %d tokens and are skipped",
            *(source.num_dropped, settings.data_path, settings.max_seq_len),
        )


def _rank_zero_first(ranks: DistributedContext, compute: Callable[[], ResultT]) -> ResultT:
    """Compute on rank 0 first, so that the other ranks find the files it wrote."""
    results: list[ResultT] = []
    ranks.run_on_rank_zero(lambda: results.append(compute()))
    return results[0] if results else compute()


def _build_dpo(inputs: StageInputs) -> DpoStage:
    path = inputs.settings.ref_path
    if path is None:
        return DpoStage(inputs, None)
    reference = load_model(path, inputs.model.config)
    _check_vocabulary(reference, inputs.tokenizer, path)
    return DpoStage(inputs, _to_device(reference, inputs.device), digest_weights(path))


def _build_distill(inputs: StageInputs) -> DistillStage:
    path = inputs.settings.teacher
    if path is None:
        return DistillStage(inputs, None)
    teacher = load_model(path, inputs.model.config)
    return DistillStage(inputs, _to_device(teacher, inputs.device), digest_weights(path))


_STAGE_BUILDERS: Mapping[str, Callable[[StageInputs], PretrainStage | DpoStage]] = {
    "pretrain": PretrainStage,
    "sft": SftStage,
    "dpo": _build_dpo,
    "r1": _build_distill,
}


# --- tokens ---------------------------------------------------------------------------------


def load_or_train_tokenizer(settings: TrainSettings) -> TextTokenizer:
    """Load the given tokenizer or the parent's, or train a new one on the data."""
    if settings.tokenizer_dir is not None:
        return tokenizers.load_tokenizer(settings.tokenizer_dir)
    if (
        settings.init_from is not None
        and (settings.init_from / tokenizers.TOKENIZER_FILE).is_file()
    ):
        return tokenizers.load_tokenizer(settings.init_from)
    if settings.init_from is not None:
        raise ConfigError(
            f"{settings.init_from} has no tokenizer", hint="Pass its folder with --tokenizer_dir."
        )
    folder = settings.out_dir / "tokenizer"
    tokenizers.train_tokenizer_folder([settings.data_path], folder, settings.vocab_size)
    return tokenizers.load_tokenizer(folder)


def open_splits(
    stage_name: str, settings: TrainSettings, tokenizer: TextTokenizer
) -> tuple[DataSplit, DataSplit]:
    """Return the training split and the eval split."""
    cache = settings.out_dir / TOKENS_DIR
    file = open_token_file(settings.data_path, tokenizer, stage_name, cache, settings.limit)
    is_useful = _check_trainable_rows(settings.data_path, file, settings.max_seq_len)
    if settings.eval_data_path is not None:
        other = open_token_file(
            settings.eval_data_path, tokenizer, stage_name, cache, settings.eval_samples
        )
        _check_trainable_rows(settings.eval_data_path, other, settings.max_seq_len)
        return DataSplit(file, np.arange(file.num_rows)), DataSplit(
            other, np.arange(other.num_rows)
        )
    train, held = split_held_out(file.row_digests, settings.eval_samples, settings.seed, is_useful)
    if not is_useful[train].any():
        raise InvalidInput(
            f"{settings.data_path} has {format_count(int(is_useful.sum()), 'usable row')}, "
            "and none is left for training after holding one out",
            hint="Add different rows, or pass --eval_data_path.",
        )
    return DataSplit(file, train), DataSplit(file, held)


def _check_trainable_rows(path: Path, file: TokenFile, max_length: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the usable rows; raises InvalidInput if there are none."""
    is_useful = find_trainable_rows(file, max_length)
    if not is_useful.any():
        raise InvalidInput(
            f"{path}: no row has targets within its first {max_length} tokens",
            hint="Raise --max_seq_len, or use shorter rows.",
        )
    return is_useful


# --- the model ------------------------------------------------------------------------------


def load_or_create_model(
    settings: TrainSettings, tokenizer: TextTokenizer
) -> tuple[PreTrainedModel, str]:
    """Return the model to train and the digest of its initial weights (empty if random)."""
    parent = settings.init_from
    if parent is None:
        return make_model(_new_config(settings, tokenizer), settings.seed), ""
    model = load_model(parent, None if parent.is_dir() else _new_config(settings, tokenizer))
    check_sizes(model.config, settings, parent)
    _check_vocabulary(model, tokenizer, parent)
    config = model.config
    config.max_position_embeddings = max(config.max_position_embeddings, settings.max_seq_len)
    return model, digest_weights(parent)


def _new_config(settings: TrainSettings, tokenizer: TextTokenizer) -> PreTrainedConfig:
    return make_config(
        model_sizes(settings), tokenizer.vocab_size, tokenizer.end_of_turn, tokenizer.end_of_text
    )


def _check_vocabulary(model: PreTrainedModel, tokenizer: TextTokenizer, path: Path) -> None:
    size = model.config.vocab_size
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"the tokenizer in {tokenizer.folder} has {tokenizer.vocab_size} tokens, but the model "
            f"in {path} supports {size}",
            hint="Use the tokenizer the model was trained with.",
        )


def _to_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved


# --- result ---------------------------------------------------------------------------------


def write_result(result: TrainResult, out_dir: Path) -> None:
    """Write result.json atomically."""
    content: dict[str, object] = {
        "stage": result.stage,
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 3),
        "metrics": metric_changes(result.before, result.after),
        "digest": digest_weights(out_dir / EXPORT_NAME),
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_file_atomic(out_dir / RESULT_FILE, text.encode(), mode=0o644)


def metric_changes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Return each metric before and after training; None replaces values that are not finite."""
    return {
        name: {"before": _finite(before.get(name)), "after": _finite(value)}
        for name, value in after.items()
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def summarize_result(result: TrainResult) -> str:
    """Summarize the main metric before and after training."""
    name, after = next(iter(result.after.items()))
    before = result.before.get(name)
    old = "?" if before is None else f"{before:.4f}"
    return f"{result.stage}: {name} {old} -> {after:.4f} ({format_count(result.steps, 'step')})"
