"""Configuration of a pipeline run, read from environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tinkex.errors import ConfigError
from tinkex.pipeline.trainer_arguments import DEVICE_CHOICES, is_device
from tinkex.settings import read_set_variables

T = TypeVar("T")
STAGES = ("pretrain", "sft", "dpo", "r1")
_TRUE_WORDS, _FALSE_WORDS = (
    frozenset({"1", "true", "yes", "on"}),
    frozenset({"0", "false", "no", "off", ""}),
)


def _variable(variable: str, parse: Callable[[str], object]) -> dict[str, Any]:
    return {"variable": variable, "read": parse}


def _parse_count(text: str) -> int:
    """Parse a non-negative integer."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("a whole number such as 4")
    return int(text)


def _parse_positive(text: str) -> int:
    if not (number := _parse_count(text)):
        raise ValueError("a whole number above 0")
    return number


def _check_number(text: str) -> str:
    """Check a number but return its text, which is passed to the trainer unchanged."""
    try:
        float(text)
    except ValueError:
        raise ValueError("a number such as 0.02") from None
    return text


def _number_between(low: float, high: float) -> Callable[[str], str]:
    """Return a parser that checks a range but returns the text."""

    def read(text: str) -> str:
        # Comparisons with NaN are false, so NaN is rejected too.
        if not low <= float(_check_number(text)) <= high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        return text

    return read


def _parse_device(text: str) -> str:
    if not is_device(text):
        raise ValueError(DEVICE_CHOICES)
    return text


def _parse_flag(text: str) -> bool:
    if text.lower() not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError("1 or 0, true or false")
    return text.lower() in _TRUE_WORDS


def _parse_path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


def _parse_directory(text: str) -> Path:
    if not text:
        raise ValueError("a directory")
    return Path(text).expanduser()


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(" or ".join(names))
        return text

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Size limits of a stage; 0 means the trainer's default."""

    limit: int = 0
    """Number of data rows to use."""
    batch: int = 0
    """Sequences per batch, pairs in DPO."""
    steps: int = 0
    """Optimizer updates."""
    eval_samples: int = 0
    """Maximum number of rows to evaluate on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """All settings of a pipeline run."""

    out_dir: Path = field(default=Path("out"), metadata=_variable("OUT_DIR", _parse_directory))
    """Output directory of all stages."""
    data_root: Path = field(default=Path("data"), metadata=_variable("DATA_ROOT", _parse_directory))
    """Directory of the default data files."""
    tf_dir: Path | None = field(default=Path("tf_dir"), metadata=_variable("TF_DIR", _parse_path))
    """Directory of TensorBoard event files; empty disables them."""
    results_file: Path | None = field(default=None, metadata=_variable("RESULTS_FILE", _parse_path))
    """File for one JSON line per stage; default: eval_results.jsonl in TF_DIR, else in OUT_DIR."""
    pretrain_json: Path | None = field(
        default=None, metadata=_variable("PRETRAIN_JSON", _parse_path)
    )
    """Text rows; default: pretrain_hq.jsonl in DATA_ROOT."""
    sft_json: Path | None = field(default=None, metadata=_variable("SFT_JSON", _parse_path))
    """Conversations; default: final/sft_high_quality.jsonl in DATA_ROOT."""
    dpo_json: Path | None = field(default=None, metadata=_variable("DPO_JSON", _parse_path))
    """Preference pairs; default: dpo_pairs.jsonl or dpo.jsonl in DATA_ROOT."""
    r1_json: Path | None = field(default=None, metadata=_variable("R1_JSON", _parse_path))
    """Conversations with reasoning; default: r1_mix_1024.jsonl in DATA_ROOT."""
    hidden_size: int = field(default=512, metadata=_variable("MODEL_HIDDEN_SIZE", _parse_positive))
    """Hidden size; part of the names of the .pth files."""
    num_layers: int = field(default=8, metadata=_variable("MODEL_NUM_LAYERS", _parse_positive))
    """Number of layers."""
    num_heads: int = field(default=8, metadata=_variable("MODEL_NUM_HEADS", _parse_positive))
    """Number of query heads."""
    num_kv_heads: int = field(default=2, metadata=_variable("MODEL_NUM_KV_HEADS", _parse_positive))
    """Number of key/value heads."""
    max_seq_len: int = field(default=512, metadata=_variable("MODEL_SEQ_LEN", _parse_positive))
    """Tokens per packed sequence."""
    vocab_size: int = field(default=6400, metadata=_variable("VOCAB_SIZE", _parse_positive))
    """Maximum vocabulary size of the tokenizer."""
    use_moe: bool = field(default=False, metadata=_variable("USE_MOE", _parse_flag))
    """Use mixture-of-experts layers."""
    num_experts: int = field(default=4, metadata=_variable("NUM_EXPERTS", _parse_positive))
    """Number of experts per layer."""
    pretrained_path: Path | None = field(
        default=None, metadata=_variable("PRETRAINED_PATH", _parse_path)
    )
    """Hugging Face folder or .pth file to start SFT from instead of running pretrain."""
    keep_last: int = field(default=3, metadata=_variable("KEEP_LAST", _parse_count))
    """Number of step checkpoints to keep per stage; 0 keeps all."""
    save_interval: int = field(default=200, metadata=_variable("SAVE_INTERVAL", _parse_positive))
    """Updates between step checkpoints."""
    batch_size: int = field(default=0, metadata=_variable("BATCH_SIZE", _parse_count))
    """Sequences per batch, pairs in DPO; 0 means the trainer's default."""
    accum_steps: int = field(default=0, metadata=_variable("ACCUM_STEPS", _parse_count))
    """Batches per update; 0 means the trainer's default."""
    num_gpus: int = field(default=1, metadata=_variable("NUM_GPUS", _parse_count))
    """Number of GPUs; more than one starts as many processes with torchrun."""
    nproc: int = field(default=0, metadata=_variable("NPROC", _parse_count))
    """Number of processes without GPUs; takes precedence over NUM_GPUS."""
    optimizer: str = field(
        default="adamw", metadata=_variable("OPTIMIZER", _one_of("adamw", "muon"))
    )
    """adamw or muon."""
    muon_lr: str = field(default="0.02", metadata=_variable("MUON_LR", _check_number))
    """Muon learning rate of pretrain; later stages scale it down."""
    weight_decay: str = field(default="0.01", metadata=_variable("WEIGHT_DECAY", _check_number))
    """Weight decay."""
    seed: int = field(default=1337, metadata=_variable("SEED", _parse_count))
    """Random seed."""
    device: str = field(default="auto", metadata=_variable("DEVICE", _parse_device))
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    pretrain_args: str = field(default="", metadata=_variable("PRETRAIN_ARGS", str))
    """Extra options of the pretrain trainer, with shell quoting; they take precedence."""
    sft_args: str = field(default="", metadata=_variable("SFT_ARGS", str))
    """Extra options of the SFT trainer."""
    dpo_args: str = field(default="", metadata=_variable("DPO_ARGS", str))
    """Extra options of the DPO trainer."""
    r1_args: str = field(default="", metadata=_variable("R1_ARGS", str))
    """Extra options of the R1 trainer."""
    r1_demo: bool = field(default=True, metadata=_variable("R1_DEMO", _parse_flag))
    """Generate an answer after R1 training."""
    r1_demo_prompt: str = field(
        default="What is 7 plus 5?", metadata=_variable("R1_DEMO_PROMPT", str)
    )
    """Prompt of the demo."""
    r1_demo_max_new_tokens: int = field(
        default=256, metadata=_variable("R1_DEMO_MAX_NEW_TOKENS", _parse_positive)
    )
    """Maximum tokens of the demo answer."""
    r1_demo_temperature: str = field(
        default="0.7", metadata=_variable("R1_DEMO_TEMPERATURE", _number_between(0, 100))
    )
    """Sampling temperature of the demo; 0 is greedy."""
    r1_demo_top_p: str = field(
        default="0.9", metadata=_variable("R1_DEMO_TOP_P", _number_between(0.001, 1))
    )
    """Top-p of the demo."""
    r1_demo_seed: int = field(default=1337, metadata=_variable("R1_DEMO_SEED", _parse_count))
    """Sampling seed of the demo."""
    r1_demo_device: str = field(default="", metadata=_variable("R1_DEMO_DEVICE", _parse_device))
    """Device of the demo; default: DEVICE."""
    tb_auto: bool = field(default=True, metadata=_variable("TB_AUTO", _parse_flag))
    """Start TensorBoard, if TF_DIR is set."""
    tb_host: str = field(default="127.0.0.1", metadata=_variable("TB_HOST", str))
    """Address of TensorBoard."""
    tb_port: int = field(default=6006, metadata=_variable("TB_PORT", _parse_count))
    """Port of TensorBoard; a free one is chosen if it is in use."""
    tb_keep: bool = field(default=False, metadata=_variable("TB_KEEP", _parse_flag))
    """Keep TensorBoard running after the run."""
    trainer_dir: Path | None = field(default=None, metadata=_variable("TRAINER_DIR", _parse_path))
    """Directory of the trainer scripts; default: those of the project."""
    is_smoke: bool = False
    """True for a smoke test."""
    sizes: Mapping[str, StageSizes] = field(default_factory=dict)
    """Values of the SMOKE_ variables by stage; empty unless it is a smoke test."""

    @property
    def num_processes(self) -> int:
        """Number of training processes."""
        return max(1, self.nproc or self.num_gpus)

    @property
    def results_path(self) -> Path:
        """File for the results of the stages."""
        return self.results_file or (self.tf_dir or self.out_dir) / "eval_results.jsonl"

    def data_file(self, stage: str) -> Path | None:
        """Return the configured data file of a stage."""
        path: Path | None = getattr(self, f"{stage}_json")
        return path

    def extra_args(self, stage: str) -> str:
        """Return the extra options of a stage's trainer."""
        text: str = getattr(self, f"{stage}_args")
        return text

    def smoke_args(self, stage: str) -> str:
        """Return the smoke-test options of a stage's trainer; extra options override them."""
        return SMOKE_ARGS[stage] if self.is_smoke else ""


#: Defaults of a smoke test: a model small enough that every stage learns within seconds.
SMOKE_FIELDS: Mapping[str, object] = {
    "hidden_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "max_seq_len": 128,
    "vocab_size": 1024,
    "accum_steps": 1,
}
SMOKE_SIZES: Mapping[str, StageSizes] = {
    "pretrain": StageSizes(batch=8, steps=150, eval_samples=32),
    "sft": StageSizes(batch=8, steps=80, eval_samples=32),
    "dpo": StageSizes(batch=8, steps=20, eval_samples=16),
    "r1": StageSizes(batch=8, steps=250, eval_samples=32),
}
#: Higher learning rates for the small model; the steps end a stage, not the epochs.
SMOKE_ARGS: Mapping[str, str] = {
    "pretrain": "--learning_rate 3e-3 --epochs 100",
    "sft": "--learning_rate 2e-3 --epochs 100",
    "dpo": "--learning_rate 2e-5 --epochs 100",
    "r1": "--learning_rate 3e-3 --epochs 100",
}
#: Alternative variable names.
ALIASES = {"MINILLM_PRETRAINED_PATH": "PRETRAINED_PATH"}
#: Variables of similar scripts, and why they have no effect here.
IGNORED_VARIABLES: Mapping[str, str] = {
    "QK_NORM": "QK norm is always used",
    "LOGIT_SOFTCAP": "the model has no logit soft cap",
    "MTP_LOSS_WEIGHT": "the model predicts one token at a time",
    "USE_COMPILE": "the forward pass is already fused",
    "COMPILE_MODE": "the forward pass is already fused",
    "GRAD_CKPT": "activation checkpointing is not supported",
    "TURBO": "the fast path is always used",
    "AUTO_DOWNLOAD": "nothing is downloaded",
    "MAX_DOWNLOAD_MB": "nothing is downloaded",
    "MINIMIND_DATA_SOURCE": "nothing is downloaded",
    "MINIMIND_DATA_REPO": "nothing is downloaded",
    "MINIMIND_DATA_DIR": "set PRETRAIN_JSON and the like instead",
    "MINIMIND_MS_CACHE": "nothing is downloaded",
    "DATA_DIR": "token files are in OUT_DIR, data files in DATA_ROOT",
    "PREPROCESS_DATA": "token files are created on demand and cached",
    "PREPROCESS_WORKERS": "token files are created on demand and cached",
    "NUM_WORKERS": "batches are read from memory-mapped files without workers",
    "PREFETCH_FACTOR": "batches are read from memory-mapped files without workers",
    "GPU_MEM": "set BATCH_SIZE and ACCUM_STEPS instead",
    "SMOKE_R1_EPOCHS": "set SMOKE_R1_STEPS instead",
    "SMOKE_R1_SAVE_INTERVAL": "set SAVE_INTERVAL instead",
    "SMOKE_R1_SEQ_LEN": "set MODEL_SEQ_LEN instead",
    "SMOKE_PRETRAIN_EVAL_BATCH": "eval rows are packed like training rows",
    "SMOKE_SFT_EVAL_BATCH": "eval rows are packed like training rows",
    "SMOKE_DPO_EVAL_BATCH": "eval rows are packed like training rows",
}


def variable_names() -> list[str]:
    """Return the names of all variables, including the SMOKE_ ones."""
    names = [row.metadata["variable"] for row in fields(PipelineConfig) if row.metadata]
    return [
        *names,
        *(_smoke_variable(stage, row.name) for stage in STAGES for row in fields(StageSizes)),
    ]


def read_config(
    *, is_smoke: bool = False, environ: Mapping[str, str] | None = None
) -> PipelineConfig:
    """Read the configuration; raises ConfigError with the name of an invalid variable."""
    given = read_set_variables([*variable_names(), *ALIASES], environ)
    for other, name in ALIASES.items():
        given.setdefault(name, given.get(other, ""))
    values: dict[str, Any] = dict(SMOKE_FIELDS) if is_smoke else {}
    for row in fields(PipelineConfig):
        text = given.get(row.metadata["variable"]) if row.metadata else None
        # An empty value is meaningful only for optional paths: it means None.
        if text or (text == "" and row.metadata["read"] is _parse_path):
            values[row.name] = _parse_variable(row.metadata["variable"], text, row.metadata["read"])
    sizes = {stage: _read_smoke_sizes(stage, given) for stage in STAGES} if is_smoke else {}
    return PipelineConfig(**values, is_smoke=is_smoke, sizes=sizes)


def list_ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each variable that is set but has no effect."""
    given = read_set_variables(IGNORED_VARIABLES, environ)
    return [f"{name} has no effect: {IGNORED_VARIABLES[name]}" for name in given if given[name]]


def _parse_variable(variable: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{variable} must be {error}; got {text!r}") from None


def _smoke_variable(stage: str, size: str) -> str:
    return f"SMOKE_{stage}_{size}".upper()


def _read_smoke_sizes(stage: str, given: Mapping[str, str]) -> StageSizes:
    defaults = SMOKE_SIZES[stage]
    sizes = {
        row.name: _parse_variable(name, given[name], _parse_count)
        for row in fields(StageSizes)
        if given.get(name := _smoke_variable(stage, row.name))
    }
    if given.get("BATCH_SIZE"):
        sizes.setdefault("batch", 0)
    return replace(defaults, **sizes)
