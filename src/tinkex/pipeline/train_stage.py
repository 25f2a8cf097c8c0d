"""Train one stage as its settings describe it and write its result.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers.utils import logging as transformers_log

from tinkex.display import format_count
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.distributed import DistributedContext, init_distributed
from tinkex.pipeline.output_locks import lock_directory
from tinkex.pipeline.stage_interface import TrainResult
from tinkex.pipeline.stage_setup import TOKENS_DIR, build_stage
from tinkex.pipeline.train.loop import EXPORT_NAME, train
from tinkex.pipeline.train.metrics import ConsoleSink, make_sink
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.system.atomic import remove_scratch, write_file_atomic

RESULT_FILE = "result.json"


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
