"""Command-line options of the four trainers, as one frozen dataclass."""

# ruff: noqa: RUF009 (`_option` returns a dataclass field)
from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

#: The stages in their order, and what their trainers do.
STAGE_DESCRIPTIONS: Mapping[str, str] = {
    "pretrain": "Train a base model on plain text.",
    "sft": "Fine-tune a base model on conversations.",
    "dpo": "Train a model on preference pairs with DPO.",
    "r1": "Train a model to reason before it answers.",
}
#: The stage whose result each stage usually starts from.
PARENT_STAGES: Mapping[str, str] = {"sft": "pretrain", "dpo": "sft", "r1": "dpo"}
#: Defaults that differ between stages.
STAGE_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "pretrain": {"learning_rate": 6e-4, "muon_lr": 0.02, "accumulation_steps": 4},
    "sft": {"learning_rate": 2e-4, "muon_lr": 0.006},
    "dpo": {"learning_rate": 5e-6, "muon_lr": 0.0002, "batch_size": 4},
    "r1": {"learning_rate": 2e-4, "muon_lr": 0.006},
}
#: Accepted devices, for messages.
DEVICE_CHOICES = "auto, cpu, cuda, cuda:1 or mps"
R1_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")


def _boolean(text: str) -> bool:
    """Parse true or false; `bool("false")` would be True."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return known[text.lower()]


def _number(
    number_type: type[int] | type[float], minimum: float, is_exclusive: bool
) -> Callable[[str], float]:
    what = "a whole number" if number_type is int else "a number"
    than = f"above {minimum:g}" if is_exclusive else f"of at least {minimum:g}"

    def parse(text: str) -> float:
        try:
            value = number_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None
        # Comparisons with NaN are false, so NaN is rejected too.
        if not (value > minimum if is_exclusive else value >= minimum) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"expected {what} {than}, got {text}")
        return value

    return parse


def _fraction(text: str) -> float:
    value = _NON_NEGATIVE(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return value


def is_device(text: str) -> bool:
    """Return True if the text is a device name; the device need not exist."""
    return bool(re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", text))


def _device(text: str) -> str:
    if not is_device(text):
        raise argparse.ArgumentTypeError(f"expected {DEVICE_CHOICES}, got {text!r}")
    return text


def _token_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_POSITIVE_INT = _number(int, 1, is_exclusive=False)
_NON_NEGATIVE_INT = _number(int, 0, is_exclusive=False)
_POSITIVE = _number(float, 0, is_exclusive=True)
_NON_NEGATIVE = _number(float, 0, is_exclusive=False)


def _option(
    parse: Callable[[str], Any] | None, help_text: str, default: Any = MISSING, **extra: Any
) -> Any:
    """Declare a field as an option.

    `only` names the one stage that has it; `is_reserved` options are set by the pipeline run;
    `affects_weights=False` marks options that do not change the result.
    """
    return field(default=default, metadata={"parse": parse, "help": help_text, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """All options of a trainer."""

    out_dir: Path = _option(Path, "Directory for everything this stage writes.", is_reserved=True)
    data_path: Path = _option(Path, "Training data: JSONL, one object per line.", is_reserved=True)
    eval_data_path: Path | None = _option(
        Path, "Evaluation data; default: rows held out of the training data.", None
    )
    tokenizer_dir: Path | None = _option(
        Path,
        "Tokenizer folder; default: the parent's, or a new one is trained.",
        None,
        is_reserved=True,
    )
    init_from: Path | None = _option(
        Path, "Initial weights: a model folder or a .pth file.", None, is_reserved=True
    )
    ref_path: Path | None = _option(
        Path, "Reference model; default: the initial weights.", None, only="dpo"
    )
    teacher: Path | None = _option(
        Path, "Model folder of a teacher to distill from.", None, only="r1"
    )
    hidden_size: int | None = _option(
        _POSITIVE_INT, "Hidden size; default: 512, or the parent's.", None
    )
    num_layers: int | None = _option(
        _POSITIVE_INT, "Number of layers; default: 8, or the parent's.", None
    )
    num_heads: int | None = _option(
        _POSITIVE_INT, "Number of query heads; default: 8, or the parent's.", None
    )
    num_kv_heads: int | None = _option(
        _POSITIVE_INT, "Number of key/value heads; default: 2, or the parent's.", None
    )
    intermediate_size: int = _option(
        _NON_NEGATIVE_INT, "MLP width; 0 means 8/3 of the hidden size.", 0
    )
    max_seq_len: int = _option(_POSITIVE_INT, "Maximum tokens per training sequence.", 512)
    use_moe: bool = _option(_boolean, "Use mixture-of-experts layers.", False, metavar="true|false")
    num_experts: int = _option(
        _POSITIVE_INT, "Number of experts per layer; two are active per token.", 4
    )
    vocab_size: int = _option(
        _POSITIVE_INT, "Vocabulary size of a tokenizer that is trained here.", 6400
    )
    epochs: int = _option(_POSITIVE_INT, "Number of passes over the data.", 1)
    max_steps: int = _option(
        _NON_NEGATIVE_INT, "Optimizer updates after which to stop; 0: no limit.", 0
    )
    batch_size: int = _option(
        _POSITIVE_INT, "Packed sequences of max_seq_len per micro-batch; pairs in DPO.", 8
    )
    accumulation_steps: int = _option(_POSITIVE_INT, "Micro-batches per optimizer update.", 1)
    learning_rate: float = _option(_POSITIVE, "Peak learning rate.", 6e-4)
    min_learning_rate: float | None = _option(
        _NON_NEGATIVE, "Final learning rate; default: a tenth of the peak.", None
    )
    warmup_steps: int | None = _option(
        _NON_NEGATIVE_INT, "Warmup updates; default: a twentieth of all, at most 200.", None
    )
    schedule: str = _option(
        str, "Learning-rate schedule.", "cosine", choices=("cosine", "constant")
    )
    optimizer: str = _option(str, "Optimizer.", "adamw", choices=("adamw", "muon"))
    muon_lr: float = _option(_POSITIVE, "Learning rate of the matrices that Muon trains.", 0.02)
    weight_decay: float = _option(_NON_NEGATIVE, "Weight decay of matrices; norms have none.", 0.01)
    grad_clip: float = _option(_NON_NEGATIVE, "Maximum gradient norm; 0: no clipping.", 1.0)
    seed: int = _option(
        _NON_NEGATIVE_INT, "Seed of initial weights, data order and the eval split.", 1337
    )
    save_interval: int = _option(
        _NON_NEGATIVE_INT, "Updates between step checkpoints; 0: never.", 200, affects_weights=False
    )
    save_interval_seconds: float = _option(
        _NON_NEGATIVE, "Seconds between step checkpoints; 0: never.", 0.0, affects_weights=False
    )
    keep_last_checkpoints: int = _option(
        _NON_NEGATIVE_INT,
        "Number of newest step checkpoints to keep; 0: all.",
        3,
        affects_weights=False,
    )
    keep_every: int = _option(
        _NON_NEGATIVE_INT,
        "Also keep steps that are multiples of this number.",
        0,
        affects_weights=False,
    )
    ckpt_dir: Path | None = _option(
        Path, "Root of step checkpoints; default: <out_dir>/checkpoints.", None, is_reserved=True
    )
    resume: str | None = _option(
        str, "Step checkpoint to resume from; 'auto': the newest.", None, is_reserved=True
    )
    allow_partial: bool = _option(
        None,
        "Resume even if settings or weights of the checkpoint differ.",
        False,
        action="store_true",
        affects_weights=False,
    )
    eval_interval: int = _option(
        _NON_NEGATIVE_INT,
        "Updates between evaluations; 0: only before and after training.",
        0,
        affects_weights=False,
    )
    eval_samples: int = _option(_POSITIVE_INT, "Maximum number of rows to evaluate on.", 64)
    log_interval: int = _option(
        _POSITIVE_INT, "Updates between metric log lines.", 10, affects_weights=False
    )
    device: str = _option(
        _device, "Device: auto, cpu, cuda, cuda:1 or mps.", "auto", affects_weights=False
    )
    dtype: str = _option(
        str, "Data type of the computation.", "auto", choices=("auto", "float32", "bfloat16")
    )
    tensorboard_dir: Path | None = _option(
        Path, "Directory of TensorBoard event files.", None, is_reserved=True
    )
    metrics_file: Path | None = _option(
        Path, "Metrics file; default: <out_dir>/metrics.jsonl.", None, affects_weights=False
    )
    limit: int = _option(_NON_NEGATIVE_INT, "Number of data rows to use; 0: all.", 0)
    beta: float = _option(
        _POSITIVE, "DPO beta: strength of the penalty for leaving the reference.", 0.1, only="dpo"
    )
    r1_token_weight: float = _option(
        _NON_NEGATIVE, "Loss weight of the tag tokens.", 10.0, only="r1"
    )
    r1_tokens: tuple[str, ...] = _option(
        _token_list, "Comma-separated tag tokens.", R1_TOKENS, only="r1"
    )
    distill_alpha: float = _option(
        _fraction, "Weight of the text loss relative to the teacher loss.", 0.5, only="r1"
    )
    distill_temperature: float = _option(
        _POSITIVE, "Softmax temperature of the distillation loss.", 1.5, only="r1"
    )

    @property
    def final_learning_rate(self) -> float:
        """Learning rate at the end of the schedule."""
        final = self.min_learning_rate
        return self.learning_rate / 10 if final is None else final


def parse_arguments(stage: str, argv: Sequence[str] | None = None) -> TrainerArguments:
    """Parse a trainer's command line; exits with code 2 if it is invalid."""
    parser = make_parser(stage)
    namespace = parser.parse_args(argv)
    if problem := find_problem(stage, namespace):
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    return TrainerArguments(**vars(namespace))


def make_parser(stage: str) -> argparse.ArgumentParser:
    """Build the argument parser of a stage's trainer."""
    parser = argparse.ArgumentParser(
        # One line, so that an error message is not preceded by a page of options.
        usage=f"%(prog)s --data_path FILE --out_dir FOLDER {_parent_usage(stage)}[options]; "
        "--help lists them",
        description=STAGE_DESCRIPTIONS[stage],
        allow_abbrev=False,
    )
    for option in fields(TrainerArguments):
        if option.metadata.get("only", stage) == stage:
            _add_option(parser, option.name, option.default, option.metadata, STAGE_DEFAULTS[stage])
        else:
            parser.set_defaults(**{option.name: option.default})
    return parser


def _parent_usage(stage: str) -> str:
    return "--init_from FOLDER " if stage in PARENT_STAGES else ""


def option_names(stage: str) -> frozenset[str]:
    """Return the option names of a stage's trainer."""
    return frozenset(
        option.name
        for option in fields(TrainerArguments)
        if option.metadata.get("only", stage) == stage
    )


#: Options that the pipeline run sets; PRETRAIN_ARGS and the like may not contain them.
RESERVED_OPTIONS = frozenset(
    option.name for option in fields(TrainerArguments) if option.metadata.get("is_reserved")
)
#: Options that do not change the resulting weights. The number of held-out rows does, because
#: those rows are not trained on.
INCIDENTAL_OPTIONS = RESERVED_OPTIONS | {
    option.name
    for option in fields(TrainerArguments)
    if not option.metadata.get("affects_weights", True)
}


def _add_option(
    parser: argparse.ArgumentParser,
    name: str,
    default: Any,
    metadata: Mapping[str, Any],
    defaults: Mapping[str, object],
) -> None:
    more = {key: metadata[key] for key in ("choices", "metavar", "action") if key in metadata}
    if metadata["parse"] is not None:
        more["type"] = metadata["parse"]
    text = metadata["help"]
    if default is MISSING:
        more["required"] = True
    else:
        more["default"] = defaults.get(name, default)
        text += (
            f" (default: {_format_default(more['default'])})"
            if _format_default(more["default"])
            else ""
        )
    parser.add_argument(f"--{name}", help=text, **more)


def _format_default(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(default)
    return "" if default is None or default is False else str(default)


def find_problem(stage: str, namespace: argparse.Namespace) -> str | None:
    """Return what is wrong with the combination of options, or None."""
    args = TrainerArguments(**vars(namespace))
    heads, kv_heads = args.num_heads or 8, args.num_kv_heads or 2
    hidden = args.hidden_size or 512
    # Sizes that are not given come from the parent folder, which is not read here.
    sizes_known = args.init_from is None or args.init_from.suffix == ".pth"
    if sizes_known and (hidden % heads or (hidden // heads) % 2):
        return f"--hidden_size {hidden} cannot be split into {heads} heads of an even width"
    if sizes_known and heads % kv_heads:
        return f"--num_heads {heads} is not a multiple of --num_kv_heads {kv_heads}"
    if args.final_learning_rate > args.learning_rate:
        return f"--min_learning_rate {args.final_learning_rate} is above --learning_rate"
    if stage == "r1" and not args.r1_tokens:
        return "--r1_tokens is empty"
    # Also required to resume: tokenizer, parent and reference are compared with the checkpoint.
    if stage in PARENT_STAGES and args.init_from is None:
        parent = PARENT_STAGES[stage]
        return f"--init_from is missing: pass a model, such as the folder out/{parent}/hf"
    return None
