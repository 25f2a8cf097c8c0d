"""Settings of a trainer: one frozen dataclass from the environment to the training loop."""

# ruff: noqa: RUF009 (`setting` returns a dataclass field)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinkex.errors import ConfigError
from tinkex.pipeline.settings_options import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    Option,
    count_or_default,
    find_options,
    format_value,
    number_between,
    one_of,
    parse_boolean,
    parse_device,
    parse_tokens,
    required,
    setting,
)
from tinkex.schedules import learning_rate

ScheduleName = Literal["cosine", "constant"]
OptimizerName = Literal["adamw", "muon"]

R1_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
_MAX_WARMUP_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """All settings of a trainer."""

    out_dir: Path = required(Path, "Directory for everything this stage writes.", is_reserved=True)
    data_path: Path = required(Path, "Training data: JSONL, one object per line.", is_reserved=True)
    eval_data_path: Path | None = setting(
        None, Path, "Evaluation data; default: rows held out of the training data."
    )
    tokenizer_dir: Path | None = setting(
        None,
        Path,
        "Tokenizer folder; default: the parent's, or a new one is trained.",
        is_reserved=True,
    )
    init_from: Path | None = setting(
        None, Path, "Initial weights: a model folder or a .pth file.", is_reserved=True
    )
    ref_path: Path | None = setting(
        None, Path, "Reference model; default: the initial weights.", stages=("dpo",)
    )
    teacher: Path | None = setting(
        None, Path, "Model folder of a teacher to distill from.", stages=("r1",)
    )
    hidden_size: int | None = setting(
        None, POSITIVE_INT, "Hidden size; default: 512, or the parent's.", "MODEL_HIDDEN_SIZE"
    )
    num_layers: int | None = setting(
        None, POSITIVE_INT, "Number of layers; default: 8, or the parent's.", "MODEL_NUM_LAYERS"
    )
    num_heads: int | None = setting(
        None, POSITIVE_INT, "Number of query heads; default: 8, or the parent's.", "MODEL_NUM_HEADS"
    )
    num_kv_heads: int | None = setting(
        None,
        POSITIVE_INT,
        "Number of key/value heads; default: 2, or the parent's.",
        "MODEL_NUM_KV_HEADS",
    )
    intermediate_size: int = setting(0, COUNT, "MLP width; 0 means 8/3 of the hidden size.")
    max_seq_len: int = setting(
        512, POSITIVE_INT, "Maximum tokens per training sequence.", "MODEL_SEQ_LEN"
    )
    use_moe: bool = setting(
        False, parse_boolean, "Use mixture-of-experts layers: true or false.", "USE_MOE"
    )
    num_experts: int = setting(
        4, POSITIVE_INT, "Number of experts per layer; two are active per token.", "NUM_EXPERTS"
    )
    vocab_size: int = setting(
        6400, POSITIVE_INT, "Vocabulary size of a tokenizer that is trained here."
    )
    epochs: int = setting(1, POSITIVE_INT, "Number of passes over the data.")
    max_steps: int = setting(
        0, COUNT, "Optimizer updates after which to stop; 0: no limit.", smoke="STEPS"
    )
    batch_size: int = setting(
        8,
        POSITIVE_INT,
        "Packed sequences of max_seq_len per micro-batch; pairs in DPO.",
        "BATCH_SIZE",
        parse_env=count_or_default,
        smoke="BATCH",
    )
    accumulation_steps: int = setting(
        1,
        POSITIVE_INT,
        "Micro-batches per optimizer update.",
        "ACCUM_STEPS",
        parse_env=count_or_default,
    )
    learning_rate: float = setting(6e-4, POSITIVE, "Peak learning rate.")
    min_learning_rate: float | None = setting(
        None, NON_NEGATIVE, "Final learning rate; default: a tenth of the peak."
    )
    warmup_steps: int | None = setting(
        None, COUNT, "Warmup updates; default: a twentieth of all, at most 200."
    )
    schedule: ScheduleName = setting(
        "cosine", one_of("cosine", "constant"), "Learning-rate schedule: cosine or constant."
    )
    optimizer: OptimizerName = setting(
        "adamw", one_of("adamw", "muon"), "Optimizer: adamw or muon.", "OPTIMIZER"
    )
    muon_lr: float = setting(
        0.02, POSITIVE, "Learning rate of the matrices that Muon trains.", "MUON_LR"
    )
    weight_decay: float = setting(
        0.01, NON_NEGATIVE, "Weight decay of matrices; norms have none.", "WEIGHT_DECAY"
    )
    grad_clip: float = setting(1.0, NON_NEGATIVE, "Maximum gradient norm; 0: no clipping.")
    seed: int = setting(
        1337, COUNT, "Seed of initial weights, data order and the eval split.", "SEED"
    )
    save_interval: int = setting(
        200,
        COUNT,
        "Updates between step checkpoints; 0: never.",
        "SAVE_INTERVAL",
        parse_env=POSITIVE_INT,
        affects_weights=False,
    )
    save_interval_seconds: float = setting(
        0.0, NON_NEGATIVE, "Seconds between step checkpoints; 0: never.", affects_weights=False
    )
    keep_last_checkpoints: int = setting(
        3,
        COUNT,
        "Number of newest step checkpoints to keep; 0: all.",
        "KEEP_LAST",
        affects_weights=False,
    )
    keep_every: int = setting(
        0, COUNT, "Also keep steps that are multiples of this number.", affects_weights=False
    )
    resume: str | None = setting(
        None, str, "Step checkpoint to resume from; 'auto': the newest.", is_reserved=True
    )
    ckpt_dir: Path | None = setting(
        None, Path, "Root of step checkpoints; default: <out_dir>/checkpoints.", is_reserved=True
    )
    allow_partial: bool = setting(
        False,
        parse_boolean,
        "Resume even if settings or weights of the checkpoint differ.",
        affects_weights=False,
        is_switch=True,
    )
    eval_interval: int = setting(
        0,
        COUNT,
        "Updates between evaluations; 0: only before and after training.",
        affects_weights=False,
    )
    # It affects the weights, because the rows of the eval split are not trained on.
    eval_samples: int = setting(
        64, POSITIVE_INT, "Maximum number of rows to evaluate on.", smoke="EVAL_SAMPLES"
    )
    log_interval: int = setting(
        10, POSITIVE_INT, "Updates between metric log lines.", affects_weights=False
    )
    device: str = setting(
        "auto",
        parse_device,
        "Device: auto, cpu, cuda, cuda:1 or mps.",
        "DEVICE",
        affects_weights=False,
    )
    dtype: str = setting(
        "auto", one_of("auto", "float32", "bfloat16"), "Data type: auto, float32 or bfloat16."
    )
    tensorboard_dir: Path | None = setting(
        None, Path, "Directory of TensorBoard event files.", is_reserved=True
    )
    metrics_file: Path | None = setting(
        None, Path, "Metrics file; default: <out_dir>/metrics.jsonl.", affects_weights=False
    )
    limit: int = setting(0, COUNT, "Number of data rows to use; 0: all.", smoke="LIMIT")
    beta: float = setting(
        0.1,
        POSITIVE,
        "DPO beta: strength of the penalty for leaving the reference.",
        stages=("dpo",),
    )
    r1_token_weight: float = setting(
        10.0, NON_NEGATIVE, "Loss weight of the tag tokens.", stages=("r1",)
    )
    r1_tokens: tuple[str, ...] = setting(
        R1_TOKENS, parse_tokens, "Comma-separated tag tokens.", stages=("r1",)
    )
    distill_alpha: float = setting(
        0.5,
        number_between(0, 1),
        "Weight of the text loss relative to the teacher loss.",
        stages=("r1",),
    )
    distill_temperature: float = setting(
        1.5, POSITIVE, "Softmax temperature of the distillation loss.", stages=("r1",)
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                option.parse(format_value(value))
            except ValueError as error:
                raise ConfigError(f"{name} must be {error}; got {value!r}") from None

    @property
    def checkpoint_root(self) -> Path:
        """Root directory of step checkpoints."""
        return self.ckpt_dir if self.ckpt_dir is not None else self.out_dir / "checkpoints"

    @property
    def final_learning_rate(self) -> float:
        """Learning rate at the end of the schedule."""
        final = self.min_learning_rate
        return self.learning_rate / 10 if final is None else final

    def resolve_warmup(self, num_batches: int, world_size: int) -> int:
        """Return the number of warmup updates, given the batches of an epoch over all ranks."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        per_epoch = -(-num_batches // (self.accumulation_steps * world_size))
        return min(_MAX_WARMUP_STEPS, (self.max_steps or self.epochs * per_epoch) // 20)

    def lr_factor(self, step: int, total_steps: int, warmup_steps: int) -> float:
        """Return the learning rate of the update after `step` others, relative to its peak.

        Optimizer parameter groups have different peaks and share this factor.
        """
        return learning_rate(
            step,
            peak=1.0,
            warmup=warmup_steps,
            total=total_steps,
            kind=self.schedule,
            floor=self.final_learning_rate / self.learning_rate,
        )

    def is_save_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` updates."""
        return bool(self.save_interval) and step % self.save_interval == 0

    def is_evaluation_due(self, step: int) -> bool:
        """Return True if an evaluation is due: before the first update and at every interval."""
        return step == 0 or (bool(self.eval_interval) and step % self.eval_interval == 0)


#: The options of all stages by field name.
OPTIONS: Mapping[str, Option] = find_options(TrainSettings)
