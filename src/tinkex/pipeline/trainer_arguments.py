"""The command line of the four trainers: one table of options, read into one frozen value."""

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
    "sft": "Teach a base model to answer, from conversations.",
    "dpo": "Teach a model which of two answers people prefer.",
    "r1": "Teach a model to think before it answers.",
}
#: Whose result a stage usually starts from; random weights would learn next to nothing.
PARENT_STAGES: Mapping[str, str] = {"sft": "pretrain", "dpo": "sft", "r1": "dpo"}
#: What a stage has for a default where the stages differ.
STAGE_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "pretrain": {"learning_rate": 6e-4, "muon_lr": 0.02, "accumulation_steps": 4},
    "sft": {"learning_rate": 2e-4, "muon_lr": 0.006},
    "dpo": {"learning_rate": 5e-6, "muon_lr": 0.0002, "batch_size": 4},
    "r1": {"learning_rate": 2e-4, "muon_lr": 0.006},
}
#: Where one can compute, as people are told.
DEVICE_CHOICES = "auto, cpu, cuda, cuda:1 or mps"
R1_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")


def _boolean(text: str) -> bool:
    """What a person means by true or false; `bool("false")` would be true."""
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
        # A comparison with "not a number" is false, whichever way it goes.
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
    """Whether a word names a place to compute, there or not."""
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


def _option(parse_value: Callable[[str], Any], help_text: str, **extra: Any) -> dict[str, Any]:
    return {"kind": parse_value, "help": help_text, **extra}


def _switch(help_text: str) -> Any:
    return field(default=False, metadata={"help": help_text, "action": "store_true"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """Everything that can be said to a trainer."""

    out_dir: Path = field(metadata=_option(Path, "Where everything this stage makes is put."))
    data_path: Path = field(metadata=_option(Path, "The stage's data: JSON, one object per line."))
    eval_data_path: Path | None = field(
        default=None,
        metadata=_option(Path, "Data to evaluate on; without it, rows of the data are held out."),
    )
    tokenizer_dir: Path | None = field(
        default=None,
        metadata=_option(
            Path, "The tokenizer's folder; without it, the parent's, or a new one is trained."
        ),
    )
    init_from: Path | None = field(
        default=None,
        metadata=_option(Path, "Weights to start from: a model folder, or a .pth file."),
    )
    ref_path: Path | None = field(
        default=None,
        metadata=_option(Path, "The reference model; without it, the start weights.", only="dpo"),
    )
    teacher: Path | None = field(
        default=None,
        metadata=_option(Path, "A model folder whose probabilities are learned too.", only="r1"),
    )
    hidden_size: int | None = field(
        default=None, metadata=_option(_POSITIVE_INT, "Width of the model; 512, or the parent's.")
    )
    num_layers: int | None = field(
        default=None, metadata=_option(_POSITIVE_INT, "Layers of the model; 8, or the parent's.")
    )
    num_heads: int | None = field(
        default=None, metadata=_option(_POSITIVE_INT, "Query heads; 8, or the parent's.")
    )
    num_kv_heads: int | None = field(
        default=None, metadata=_option(_POSITIVE_INT, "Key heads; 2, or the parent's.")
    )
    intermediate_size: int = field(
        default=0,
        metadata=_option(_NON_NEGATIVE_INT, "Width of the MLP; 0 chooses 8/3 of the width."),
    )
    max_seq_len: int = field(
        default=512, metadata=_option(_POSITIVE_INT, "Most tokens of a training sequence.")
    )
    use_moe: bool = field(
        default=False,
        metadata=_option(_boolean, "Whether layers have experts.", metavar="true|false"),
    )
    num_experts: int = field(
        default=4,
        metadata=_option(_POSITIVE_INT, "How many experts, of which two work on a token."),
    )
    vocab_size: int = field(
        default=6400, metadata=_option(_POSITIVE_INT, "Size of a tokenizer that is trained here.")
    )
    epochs: int = field(default=1, metadata=_option(_POSITIVE_INT, "How often the data is seen."))
    max_steps: int = field(
        default=0,
        metadata=_option(_NON_NEGATIVE_INT, "Optimizer updates after which to stop; 0 is all."),
    )
    batch_size: int = field(
        default=8,
        metadata=_option(_POSITIVE_INT, "Packed sequences of max_seq_len per batch; pairs in DPO."),
    )
    accumulation_steps: int = field(
        default=1, metadata=_option(_POSITIVE_INT, "Batches per optimizer update.")
    )
    learning_rate: float = field(
        default=6e-4, metadata=_option(_POSITIVE, "The highest learning rate.")
    )
    min_learning_rate: float | None = field(
        default=None,
        metadata=_option(_NON_NEGATIVE, "Where the learning rate ends; a tenth of the highest."),
    )
    warmup_steps: int | None = field(
        default=None,
        metadata=_option(_NON_NEGATIVE_INT, "Updates of warm-up; a twentieth of all, at most 200."),
    )
    schedule: str = field(
        default="cosine", metadata=_option(str, "How it falls.", choices=("cosine", "constant"))
    )
    optimizer: str = field(
        default="adamw", metadata=_option(str, "The optimizer.", choices=("adamw", "muon"))
    )
    muon_lr: float = field(
        default=0.02, metadata=_option(_POSITIVE, "Learning rate of the matrices that Muon trains.")
    )
    weight_decay: float = field(
        default=0.01, metadata=_option(_NON_NEGATIVE, "Decay of matrices; norms have none.")
    )
    grad_clip: float = field(
        default=1.0, metadata=_option(_NON_NEGATIVE, "Longest gradient; 0 does not clip.")
    )
    seed: int = field(
        default=1337,
        metadata=_option(
            _NON_NEGATIVE_INT, "What start weights, order and held-out rows depend on."
        ),
    )
    save_interval: int = field(
        default=200,
        metadata=_option(_NON_NEGATIVE_INT, "Updates between step checkpoints; 0 is never."),
    )
    save_interval_seconds: float = field(
        default=0.0, metadata=_option(_NON_NEGATIVE, "Seconds between them; 0 is never.")
    )
    keep_last_checkpoints: int = field(
        default=3, metadata=_option(_NON_NEGATIVE_INT, "How many of the newest are kept; 0 is all.")
    )
    keep_every: int = field(
        default=0, metadata=_option(_NON_NEGATIVE_INT, "Multiples of this step are kept too.")
    )
    ckpt_dir: Path | None = field(
        default=None, metadata=_option(Path, "Root of checkpoints; <out_dir>/checkpoints.")
    )
    resume: str | None = field(
        default=None,
        metadata=_option(str, "A step checkpoint to go on from; 'auto' takes the newest."),
    )
    allow_partial: bool = _switch("Resume although the checkpoint does not fit in all things.")
    eval_interval: int = field(
        default=0,
        metadata=_option(_NON_NEGATIVE_INT, "Updates between evaluations; 0: before and after."),
    )
    eval_samples: int = field(
        default=64, metadata=_option(_POSITIVE_INT, "Most rows to evaluate on.")
    )
    log_interval: int = field(
        default=10, metadata=_option(_POSITIVE_INT, "Updates between lines of metrics.")
    )
    device: str = field(
        default="auto", metadata=_option(_device, "Where to compute: auto, cpu, cuda, cuda:1, mps.")
    )
    dtype: str = field(
        default="auto",
        metadata=_option(str, "What to compute with.", choices=("auto", "float32", "bfloat16")),
    )
    tensorboard_dir: Path | None = field(
        default=None, metadata=_option(Path, "Where TensorBoard's files are put.")
    )
    metrics_file: Path | None = field(
        default=None, metadata=_option(Path, "Metrics; <out_dir>/metrics.jsonl.")
    )
    limit: int = field(
        default=0, metadata=_option(_NON_NEGATIVE_INT, "Rows of the data to use; 0 is all.")
    )
    beta: float = field(
        default=0.1, metadata=_option(_POSITIVE, "How firmly the reference holds.", only="dpo")
    )
    r1_token_weight: float = field(
        default=10.0, metadata=_option(_NON_NEGATIVE, "Weight of the tags in the loss.", only="r1")
    )
    r1_tokens: tuple[str, ...] = field(
        default=R1_TOKENS, metadata=_option(_token_list, "The tags, by commas.", only="r1")
    )
    distill_alpha: float = field(
        default=0.5, metadata=_option(_fraction, "Share of the text beside a teacher.", only="r1")
    )
    distill_temperature: float = field(
        default=1.5, metadata=_option(_POSITIVE, "How soft a teacher is heard.", only="r1")
    )

    @property
    def checkpoint_root(self) -> Path:
        """Where step checkpoints are."""
        return self.ckpt_dir or self.out_dir / "checkpoints"

    @property
    def final_learning_rate(self) -> float:
        """Where the learning rate ends."""
        lowest = self.min_learning_rate
        return self.learning_rate / 10 if lowest is None else lowest


def parse_arguments(stage: str, argv: Sequence[str] | None = None) -> TrainerArguments:
    """Read a trainer's command line; what is wrong ends the program with code 2."""
    parser = make_parser(stage)
    found = parser.parse_args(argv)
    if problem := find_problem(stage, found):
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    return TrainerArguments(**vars(found))


def make_parser(stage: str) -> argparse.ArgumentParser:
    """The options of a stage's trainer, with its defaults."""
    parser = argparse.ArgumentParser(
        # One line: what is wrong with an option should not follow on a page of options.
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
    """The names of all options that a stage's trainer has."""
    return frozenset(
        option.name
        for option in fields(TrainerArguments)
        if option.metadata.get("only", stage) == stage
    )


def _add_option(
    parser: argparse.ArgumentParser,
    name: str,
    default: Any,
    metadata: Mapping[str, Any],
    defaults: Mapping[str, object],
) -> None:
    more = {key: metadata[key] for key in ("choices", "metavar", "action") if key in metadata}
    if "kind" in metadata:
        more["type"] = metadata["kind"]
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
    """What is wrong with options that are each right; None if nothing is."""
    known = TrainerArguments(**vars(namespace))
    heads, kv_heads = known.num_heads or 8, known.num_kv_heads or 2
    hidden = known.hidden_size or 512
    # Sizes that are not given come from the parent; then there is nothing to check them against.
    is_told = known.init_from is None or known.init_from.suffix == ".pth"
    if is_told and (hidden % heads or (hidden // heads) % 2):
        return f"--hidden_size {hidden} does not give {heads} heads of an even width"
    if is_told and heads % kv_heads:
        return f"--num_heads {heads} is no multiple of --num_kv_heads {kv_heads}"
    if known.final_learning_rate > known.learning_rate:
        return f"--min_learning_rate {known.final_learning_rate} is above --learning_rate"
    if stage == "r1" and not known.r1_tokens:
        return "--r1_tokens names no token"
    # To resume too: tokenizer, parent and reference are compared with those of the checkpoint.
    if stage in PARENT_STAGES and known.init_from is None:
        parent = PARENT_STAGES[stage]
        return f"--init_from is missing: name a model, such as the folder out/{parent}/hf"
    return None
