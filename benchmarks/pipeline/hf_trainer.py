"""Baseline: the Trainer of transformers with its defaults, on the same rows in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.pipeline.timeline import Timeline
from benchmarks.pipeline.workload import LEARNING_RATE, WEIGHT_DECAY

IGNORED = -100


class Example(NamedTuple):
    """Tokens and their targets."""

    tokens: Tensor
    targets: Tensor


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Records when updates start and end."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._timeline.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._timeline.end()


def run(
    model: Any, examples: Sequence[Example], batch_size: int, num_updates: int, scratch: Path
) -> Timeline:
    """Train a model for some updates from its current weights."""
    timeline = Timeline()
    trainer = Trainer(
        model=model,
        args=_arguments(batch_size, num_updates, scratch),
        train_dataset=list(examples),
        data_collator=collate,
        callbacks=[_Clock(timeline)],
    )
    trainer.remove_callback(PrinterCallback)
    output = trainer.train()
    timeline.losses = [output.training_loss]
    used = examples[: batch_size * num_updates]
    batches = [used[start : start + batch_size] for start in range(0, len(used), batch_size)]
    timeline.tokens = [sum(len(example.tokens) for example in batch) for batch in batches]
    return timeline


def _arguments(batch_size: int, num_updates: int, scratch: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(scratch),
        per_device_train_batch_size=batch_size,
        max_steps=num_updates,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Pad on the right to the longest; add a mask only if there is padding."""
    tokens = torch.nn.utils.rnn.pad_sequence(
        [example.tokens for example in examples], batch_first=True
    )
    targets = torch.nn.utils.rnn.pad_sequence(
        [example.targets for example in examples], batch_first=True, padding_value=IGNORED
    )
    # The targets are already shifted.
    batch = {"input_ids": tokens, "labels": targets, "shift_labels": targets}
    lengths = torch.tensor([len(example.tokens) for example in examples])
    if int(lengths.min()) < tokens.shape[1]:
        positions = torch.arange(tokens.shape[1])
        batch["attention_mask"] = (positions < lengths[:, None]).long()
    return batch


def rows_of(stage: Any, num_batches: int) -> list[Example]:
    """Return the rows of the first batches of a stage, in order."""
    examples = []
    for index in range(num_batches):
        batch = stage.source.batch(0, index)
        targets = torch.where(batch.loss_mask_T, batch.targets_T, IGNORED)
        columns = (column.split(list(batch.lengths)) for column in (batch.tokens_T, targets))
        examples += [Example(*pair) for pair in zip(*columns, strict=True)]
    return examples
