"""What the environment says about a run of the pipeline; a sentence and a variable per field."""

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
    """A number that is not negative."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("a whole number such as 4")
    return int(text)


def _parse_positive(text: str) -> int:
    if not (number := _parse_count(text)):
        raise ValueError("a whole number above 0")
    return number


def _check_number(text: str) -> str:
    """A number as it was written: the trainer reads it, and nothing is lost on the way."""
    try:
        float(text)
    except ValueError:
        raise ValueError("a number such as 0.02") from None
    return text


def _number_between(low: float, high: float) -> Callable[[str], str]:
    """A number from one to another, as it was written."""

    def read(text: str) -> str:
        # A comparison with "not a number" is false.
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
        raise ValueError("the name of a directory")
    return Path(text).expanduser()


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(" or ".join(names))
        return text

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """How much of a stage is done; 0 leaves it to the trainer."""

    limit: int = 0
    """How many rows of the data are used."""
    batch: int = 0
    """Sequences in a batch, pairs for DPO."""
    steps: int = 0
    """Updates of the optimizer."""
    eval_samples: int = 0
    """Held-out rows that are evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Everything a run of the pipeline can be told by variables."""

    out_dir: Path = field(default=Path("out"), metadata=_variable("OUT_DIR", _parse_directory))
    """Where every stage keeps what it makes."""
    data_root: Path = field(default=Path("data"), metadata=_variable("DATA_ROOT", _parse_directory))
    """Where data files are looked for that no variable names."""
    tf_dir: Path | None = field(default=Path("tf_dir"), metadata=_variable("TF_DIR", _parse_path))
    """Where curves for TensorBoard are written; empty for none."""
    results_file: Path | None = field(default=None, metadata=_variable("RESULTS_FILE", _parse_path))
    """Gets a line of JSON per stage; eval_results.jsonl in TF_DIR, else in OUT_DIR."""
    pretrain_json: Path | None = field(
        default=None, metadata=_variable("PRETRAIN_JSON", _parse_path)
    )
    """Rows of text; pretrain_hq.jsonl in DATA_ROOT."""
    sft_json: Path | None = field(default=None, metadata=_variable("SFT_JSON", _parse_path))
    """Conversations; final/sft_high_quality.jsonl in DATA_ROOT."""
    dpo_json: Path | None = field(default=None, metadata=_variable("DPO_JSON", _parse_path))
    """Pairs of a chosen and a rejected answer; dpo_pairs.jsonl or dpo.jsonl in DATA_ROOT."""
    r1_json: Path | None = field(default=None, metadata=_variable("R1_JSON", _parse_path))
    """Conversations with reasoning; r1_mix_1024.jsonl in DATA_ROOT."""
    hidden_size: int = field(default=512, metadata=_variable("MODEL_HIDDEN_SIZE", _parse_positive))
    """How wide the model is; part of the names of the .pth files."""
    num_layers: int = field(default=8, metadata=_variable("MODEL_NUM_LAYERS", _parse_positive))
    """How many layers it has."""
    num_heads: int = field(default=8, metadata=_variable("MODEL_NUM_HEADS", _parse_positive))
    """How many attention heads a layer has."""
    num_kv_heads: int = field(default=2, metadata=_variable("MODEL_NUM_KV_HEADS", _parse_positive))
    """How many of them have keys and values of their own."""
    max_seq_len: int = field(default=512, metadata=_variable("MODEL_SEQ_LEN", _parse_positive))
    """Tokens in a packed sequence."""
    vocab_size: int = field(default=6400, metadata=_variable("VOCAB_SIZE", _parse_positive))
    """How many entries the tokenizer may have."""
    use_moe: bool = field(default=False, metadata=_variable("USE_MOE", _parse_flag))
    """Whether layers are mixtures of experts."""
    num_experts: int = field(default=4, metadata=_variable("NUM_EXPERTS", _parse_positive))
    """How many experts a layer has, if so."""
    pretrained_path: Path | None = field(
        default=None, metadata=_variable("PRETRAINED_PATH", _parse_path)
    )
    """A Hugging Face folder or .pth file to start SFT from instead of a pretrain of our own."""
    keep_last: int = field(default=3, metadata=_variable("KEEP_LAST", _parse_count))
    """How many step checkpoints of a stage stay; 0 keeps all."""
    save_interval: int = field(default=200, metadata=_variable("SAVE_INTERVAL", _parse_positive))
    """Updates between two step checkpoints."""
    batch_size: int = field(default=0, metadata=_variable("BATCH_SIZE", _parse_count))
    """Sequences in a batch, pairs for DPO; 0 leaves it to the trainer."""
    accum_steps: int = field(default=0, metadata=_variable("ACCUM_STEPS", _parse_count))
    """Batches per update; 0 leaves it to the trainer."""
    num_gpus: int = field(default=1, metadata=_variable("NUM_GPUS", _parse_count))
    """With more than one, as many processes are started by torchrun."""
    nproc: int = field(default=0, metadata=_variable("NPROC", _parse_count))
    """The same for processes without GPUs; wins over NUM_GPUS."""
    optimizer: str = field(
        default="adamw", metadata=_variable("OPTIMIZER", _one_of("adamw", "muon"))
    )
    """adamw or muon."""
    muon_lr: str = field(default="0.02", metadata=_variable("MUON_LR", _check_number))
    """Muon's learning rate in pretrain; that of the later stages is lower in proportion."""
    weight_decay: str = field(default="0.01", metadata=_variable("WEIGHT_DECAY", _check_number))
    """How fast unused weights shrink."""
    seed: int = field(default=1337, metadata=_variable("SEED", _parse_count))
    """What every random choice follows from."""
    device: str = field(default="auto", metadata=_variable("DEVICE", _parse_device))
    """Where it computes: auto, cpu, cuda."""
    pretrain_args: str = field(default="", metadata=_variable("PRETRAIN_ARGS", str))
    """More options for the trainer of pretrain, quoted as in a shell; they win."""
    sft_args: str = field(default="", metadata=_variable("SFT_ARGS", str))
    """The same for SFT."""
    dpo_args: str = field(default="", metadata=_variable("DPO_ARGS", str))
    """The same for DPO."""
    r1_args: str = field(default="", metadata=_variable("R1_ARGS", str))
    """The same for R1."""
    r1_demo: bool = field(default=True, metadata=_variable("R1_DEMO", _parse_flag))
    """Whether the model is asked something when R1 is trained."""
    r1_demo_prompt: str = field(
        default="What is 7 plus 5?", metadata=_variable("R1_DEMO_PROMPT", str)
    )
    """What it is asked."""
    r1_demo_max_new_tokens: int = field(
        default=256, metadata=_variable("R1_DEMO_MAX_NEW_TOKENS", _parse_positive)
    )
    """How long its answer may be."""
    r1_demo_temperature: str = field(
        default="0.7", metadata=_variable("R1_DEMO_TEMPERATURE", _number_between(0, 100))
    )
    """How freely it answers; 0 takes the likeliest words."""
    r1_demo_top_p: str = field(
        default="0.9", metadata=_variable("R1_DEMO_TOP_P", _number_between(0.001, 1))
    )
    """The share of likely words that are considered."""
    r1_demo_seed: int = field(default=1337, metadata=_variable("R1_DEMO_SEED", _parse_count))
    """The dice of the answer."""
    r1_demo_device: str = field(default="", metadata=_variable("R1_DEMO_DEVICE", _parse_device))
    """Where it is computed; DEVICE if not given."""
    tb_auto: bool = field(default=True, metadata=_variable("TB_AUTO", _parse_flag))
    """Whether TensorBoard is started, if TF_DIR is not empty."""
    tb_host: str = field(default="127.0.0.1", metadata=_variable("TB_HOST", str))
    """The address it listens on."""
    tb_port: int = field(default=6006, metadata=_variable("TB_PORT", _parse_count))
    """Its port; another one is taken if it is busy."""
    tb_keep: bool = field(default=False, metadata=_variable("TB_KEEP", _parse_flag))
    """Whether it stays when the run ends."""
    trainer_dir: Path | None = field(default=None, metadata=_variable("TRAINER_DIR", _parse_path))
    """Where the trainers' scripts are; those of the project if not given."""
    is_smoke: bool = False
    """Whether this is a quick try of everything."""
    sizes: Mapping[str, StageSizes] = field(default_factory=dict)
    """What the SMOKE_ variables say, by stage; nothing unless it is a quick try."""

    @property
    def num_processes(self) -> int:
        """How many processes train together."""
        return max(1, self.nproc or self.num_gpus)

    @property
    def results_path(self) -> Path:
        """Where the results of stages are noted."""
        return self.results_file or (self.tf_dir or self.out_dir) / "eval_results.jsonl"

    def data_file(self, stage: str) -> Path | None:
        """The data file that a variable names for a stage."""
        named: Path | None = getattr(self, f"{stage}_json")
        return named

    def extra_args(self, stage: str) -> str:
        """The free options of a stage's trainer."""
        text: str = getattr(self, f"{stage}_args")
        return text

    def smoke_args(self, stage: str) -> str:
        """What its trainer is told besides, unless the free options say otherwise."""
        return SMOKE_ARGS[stage] if self.is_smoke else ""


#: What a quick try does unless a variable says otherwise: the whole road, with a model so small
#: that every stage is seen to learn in seconds.
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
#: Small models learn fast; the steps end a stage, not the epochs.
SMOKE_ARGS: Mapping[str, str] = {
    "pretrain": "--learning_rate 3e-3 --epochs 100",
    "sft": "--learning_rate 2e-3 --epochs 100",
    "dpo": "--learning_rate 2e-5 --epochs 100",
    "r1": "--learning_rate 3e-3 --epochs 100",
}
#: Other names of variables.
ALIASES = {"MINILLM_PRETRAINED_PATH": "PRETRAINED_PATH"}
#: Variables of similar scripts, and why they change nothing here.
IGNORED_VARIABLES: Mapping[str, str] = {
    "QK_NORM": "queries and keys are always normalised",
    "LOGIT_SOFTCAP": "the model has no such cap",
    "MTP_LOSS_WEIGHT": "the model predicts one token at a time",
    "USE_COMPILE": "the training pass is fused by hand",
    "COMPILE_MODE": "the training pass is fused by hand",
    "GRAD_CKPT": "activations are kept",
    "TURBO": "the fast way is the only one",
    "AUTO_DOWNLOAD": "nothing is downloaded",
    "MAX_DOWNLOAD_MB": "nothing is downloaded",
    "MINIMIND_DATA_SOURCE": "nothing is downloaded",
    "MINIMIND_DATA_REPO": "nothing is downloaded",
    "MINIMIND_DATA_DIR": "set PRETRAIN_JSON and the like instead",
    "MINIMIND_MS_CACHE": "nothing is downloaded",
    "DATA_DIR": "token files are kept in OUT_DIR; data files are looked for in DATA_ROOT",
    "PREPROCESS_DATA": "token files are made when they are needed, and kept",
    "PREPROCESS_WORKERS": "token files are made when they are needed, and kept",
    "NUM_WORKERS": "batches are read from mapped files without workers",
    "PREFETCH_FACTOR": "batches are read from mapped files without workers",
    "GPU_MEM": "set BATCH_SIZE and ACCUM_STEPS instead",
    "SMOKE_R1_EPOCHS": "set SMOKE_R1_STEPS instead",
    "SMOKE_R1_SAVE_INTERVAL": "set SAVE_INTERVAL instead",
    "SMOKE_R1_SEQ_LEN": "set MODEL_SEQ_LEN instead",
    "SMOKE_PRETRAIN_EVAL_BATCH": "held-out rows are packed as the others are",
    "SMOKE_SFT_EVAL_BATCH": "held-out rows are packed as the others are",
    "SMOKE_DPO_EVAL_BATCH": "held-out rows are packed as the others are",
}


def variable_names() -> list[str]:
    """Every variable that is read, the SMOKE_ ones included."""
    own = [row.metadata["variable"] for row in fields(PipelineConfig) if row.metadata]
    return [
        *own,
        *(_smoke_variable(stage, row.name) for stage in STAGES for row in fields(StageSizes)),
    ]


def read_config(
    *, is_smoke: bool = False, environ: Mapping[str, str] | None = None
) -> PipelineConfig:
    """Read all variables; one that makes no sense is an error that names it."""
    given = read_set_variables([*variable_names(), *ALIASES], environ)
    for other, name in ALIASES.items():
        given.setdefault(name, given.get(other, ""))
    values: dict[str, Any] = dict(SMOKE_FIELDS) if is_smoke else {}
    for row in fields(PipelineConfig):
        text = given.get(row.metadata["variable"]) if row.metadata else None
        # Empty means something for a path alone: none.
        if text or (text == "" and row.metadata["read"] is _parse_path):
            values[row.name] = _parse_variable(row.metadata["variable"], text, row.metadata["read"])
    sizes = {stage: _read_smoke_sizes(stage, given) for stage in STAGES} if is_smoke else {}
    return PipelineConfig(**values, is_smoke=is_smoke, sizes=sizes)


def list_ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence about each variable that is set and changes nothing."""
    given = read_set_variables(IGNORED_VARIABLES, environ)
    return [f"{name} changes nothing: {IGNORED_VARIABLES[name]}" for name in given if given[name]]


def _parse_variable(variable: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{variable} must be {error}; got {text!r}") from None


def _smoke_variable(stage: str, size: str) -> str:
    return f"SMOKE_{stage}_{size}".upper()


def _read_smoke_sizes(stage: str, given: Mapping[str, str]) -> StageSizes:
    usual = SMOKE_SIZES[stage]
    read = {
        row.name: _parse_variable(name, given[name], _parse_count)
        for row in fields(StageSizes)
        if given.get(name := _smoke_variable(stage, row.name))
    }
    if given.get("BATCH_SIZE"):
        read.setdefault("batch", 0)
    return replace(usual, **read)
