"""Configuration of a pipeline run, read from environment variables."""

# ruff: noqa: RUF009 (`setting` returns a dataclass field)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinkex.pipeline.settings_options import (
    COUNT,
    POSITIVE_INT,
    STAGES,
    convert_values,
    count_or_default,
    find_options,
    number_between,
    parse_boolean,
    parse_device,
    parse_directory,
    parse_optional_path,
    parse_variable,
    read_environment,
    setting,
)
from tinkex.pipeline.settings_sources import DEFAULT_SIZES, STAGE_DEFAULTS, make_settings
from tinkex.pipeline.train_settings import OPTIONS, TrainSettings
from tinkex.settings import read_set_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """All settings of a pipeline run; the variable of a field is its name in capitals."""

    out_dir: Path = setting(Path("out"), parse_directory)
    """Output directory of all stages."""
    data_root: Path = setting(Path("data"), parse_directory)
    """Directory of the default data files."""
    tf_dir: Path | None = setting(Path("tf_dir"), parse_optional_path)
    """Directory of TensorBoard event files; empty disables them."""
    results_file: Path | None = setting(None, parse_optional_path)
    """File for one JSON line per stage; default: eval_results.jsonl in TF_DIR, else in OUT_DIR."""
    pretrain_json: Path | None = setting(None, parse_optional_path)
    """Text rows; default: pretrain_hq.jsonl in DATA_ROOT."""
    sft_json: Path | None = setting(None, parse_optional_path)
    """Conversations; default: final/sft_high_quality.jsonl in DATA_ROOT."""
    dpo_json: Path | None = setting(None, parse_optional_path)
    """Preference pairs; default: dpo_pairs.jsonl or dpo.jsonl in DATA_ROOT."""
    r1_json: Path | None = setting(None, parse_optional_path)
    """Conversations with reasoning; default: r1_mix_1024.jsonl in DATA_ROOT."""
    vocab_size: int = setting(6400, POSITIVE_INT)
    """Maximum vocabulary size of the tokenizer."""
    pretrained_path: Path | None = setting(None, parse_optional_path)
    """Hugging Face folder or .pth file to start SFT from instead of running pretrain."""
    num_gpus: int = setting(1, COUNT)
    """Number of GPUs; more than one starts as many processes with torchrun."""
    nproc: int = setting(0, COUNT)
    """Number of processes without GPUs; takes precedence over NUM_GPUS."""
    pretrain_args: str = setting("", str)
    """Extra options of the pretrain trainer, with shell quoting; they take precedence."""
    sft_args: str = setting("", str)
    """Extra options of the SFT trainer."""
    dpo_args: str = setting("", str)
    """Extra options of the DPO trainer."""
    r1_args: str = setting("", str)
    """Extra options of the R1 trainer."""
    r1_demo: bool = setting(True, parse_boolean)
    """Generate an answer after R1 training."""
    r1_demo_prompt: str = setting("What is 7 plus 5?", str)
    """Prompt of the demo."""
    r1_demo_max_new_tokens: int = setting(256, POSITIVE_INT)
    """Maximum tokens of the demo answer."""
    r1_demo_temperature: float = setting(0.7, number_between(0, 100))
    """Sampling temperature of the demo; 0 is greedy."""
    r1_demo_top_p: float = setting(0.9, number_between(0.001, 1))
    """Top-p of the demo."""
    r1_demo_seed: int = setting(1337, COUNT)
    """Sampling seed of the demo."""
    r1_demo_device: str = setting("", parse_device)
    """Device of the demo; default: DEVICE."""
    tb_auto: bool = setting(True, parse_boolean)
    """Start TensorBoard, if TF_DIR is set."""
    tb_host: str = setting("127.0.0.1", str)
    """Address of TensorBoard."""
    tb_port: int = setting(6006, COUNT)
    """Port of TensorBoard; a free one is chosen if it is in use."""
    tb_keep: bool = setting(False, parse_boolean)
    """Keep TensorBoard running after the run."""
    trainer_dir: Path | None = setting(None, parse_optional_path)
    """Directory of the trainer scripts; default: those of the project."""
    training: Mapping[str, object] = field(default_factory=dict)
    """Values of TrainSettings fields for all stages."""
    stage_training: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Values of TrainSettings fields by stage; they take precedence."""

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

    def settings(self, stage: str = STAGES[0]) -> TrainSettings:
        """Return the settings of a stage, without its data file, tokenizer and initial weights."""
        values: dict[str, object] = {
            **DEFAULT_SIZES,
            **self.training,
            "out_dir": self.out_dir / stage,
            "data_path": Path(),
            "tensorboard_dir": self.tf_dir / stage if self.tf_dir else None,
        }
        rate = values.pop("muon_lr", None)
        if isinstance(rate, float) and values.get("optimizer") == "muon":
            values["muon_lr"] = _scale_muon_rate(stage, rate)
        if not values.get("use_moe"):
            values.pop("num_experts", None)
        return make_settings(stage, {**values, **self.stage_training.get(stage, {})})


def _scale_muon_rate(stage: str, rate: float) -> float:
    """Scale MUON_LR, which applies to pretrain, by the ratio of the stages' defaults."""
    # The pretraining rate would destroy the model within a few updates of DPO.
    ratio = STAGE_DEFAULTS[stage]["muon_lr"] / STAGE_DEFAULTS["pretrain"]["muon_lr"]
    return rate if stage == "pretrain" else float(f"{rate * ratio:.12g}")


#: Defaults of a smoke test: a model small enough that every stage learns within seconds.
SMOKE_TRAINING: Mapping[str, object] = {
    "hidden_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "max_seq_len": 128,
    "accumulation_steps": 1,
}
SMOKE_VOCAB_SIZE = 1024
#: Higher learning rates for the small model; the steps end a stage, not the epochs.
SMOKE_STAGE_TRAINING: Mapping[str, Mapping[str, float]] = {
    "pretrain": {"batch_size": 8, "max_steps": 150, "eval_samples": 32, "learning_rate": 3e-3},
    "sft": {"batch_size": 8, "max_steps": 80, "eval_samples": 32, "learning_rate": 2e-3},
    "dpo": {"batch_size": 8, "max_steps": 20, "eval_samples": 16, "learning_rate": 2e-5},
    "r1": {"batch_size": 8, "max_steps": 250, "eval_samples": 32, "learning_rate": 3e-3},
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


_RUN_OPTIONS = {
    name: replace(option, env=name.upper()) for name, option in find_options(PipelineConfig).items()
}


def variable_names() -> list[str]:
    """Return the names of all variables, including the SMOKE_ ones."""
    options = [*_RUN_OPTIONS.values(), *OPTIONS.values()]
    smoke = [name for stage in STAGES for name in _smoke_variables(stage)]
    return [*(option.env for option in options if option.env), *smoke]


def _smoke_variables(stage: str) -> dict[str, str]:
    """Return the field that each SMOKE_ variable of a stage sets."""
    return {
        f"SMOKE_{stage.upper()}_{option.smoke}": name
        for name, option in OPTIONS.items()
        if option.smoke
    }


def read_config(
    *, is_smoke: bool = False, environ: Mapping[str, str] | None = None
) -> PipelineConfig:
    """Read the configuration; raises ConfigError with the name of an invalid variable."""
    given = read_set_variables([*variable_names(), *ALIASES], environ)
    for other, name in ALIASES.items():
        given.setdefault(name, given.get(other, ""))
    training = read_environment(OPTIONS, given)
    defaults = {"vocab_size": SMOKE_VOCAB_SIZE} if is_smoke else {}
    config = convert_values({**defaults, **read_environment(_RUN_OPTIONS, given)}, PipelineConfig)
    if not is_smoke:
        return replace(config, training=training)
    stages = {stage: _read_smoke_stage(stage, given, training) for stage in STAGES}
    return replace(config, training={**SMOKE_TRAINING, **training}, stage_training=stages)


def _read_smoke_stage(
    stage: str, given: Mapping[str, str], training: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of one stage of a smoke test; 0 means the trainer's default."""
    defaults = {"epochs": 100, **SMOKE_STAGE_TRAINING[stage]}
    values: dict[str, object] = {k: v for k, v in defaults.items() if k not in training}
    for variable, name in _smoke_variables(stage).items():
        if text := given.get(variable):
            number = parse_variable(variable, text, count_or_default)
            values = {**values, name: number or training.get(name)}
    return values


def list_ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each variable that is set but has no effect."""
    given = read_set_variables(IGNORED_VARIABLES, environ)
    return [f"{name} has no effect: {IGNORED_VARIABLES[name]}" for name in given if given[name]]
