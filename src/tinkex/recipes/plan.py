"""Settings of the recipes, validated on construction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from tinkex.errors import InvalidInput
from tinkex.ids import check_name, parse_tinker_path
from tinkex.regularizers import Regularizer, regularizer_to_dict
from tinkex.regularizers.combined import check_regularizers
from tinkex.schedules import SCHEDULE_KINDS, ScheduleKind
from tinkex.types.optimizers import check_range

if TYPE_CHECKING:
    from tinkex.client.service import LoraOptions

RlLoss = Literal["importance_sampling", "ppo", "cispo"]
RL_LOSSES = ("importance_sampling", "ppo", "cispo")
#: Settings that do not affect the weights.
_NON_TRAINING_SETTINGS = frozenset(
    {
        *("save_every", "keep_checkpoints", "eval_data", "eval_every", "samples", "sample_tokens"),
        *("data", "reward"),
    }
)
#: Settings of a new adapter; unset ones are not recorded, so that older runs stay the same.
_LORA_OPTIONS = ("alpha", "use_rslora", "target_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings common to all recipes."""

    kind: ClassVar[str] = ""

    data: Path
    """JSONL file with the training data."""
    base_model: str | None = None
    """Base model; optional if `start_from` is set."""
    start_from: str | None = None
    """tinker:// path of training weights to start from, with a new optimizer."""
    name: str | None = None
    """Prefix of checkpoint names; default: recipe and name of the data file."""
    rank: int = 32
    """LoRA rank."""
    alpha: float | None = None
    """LoRA alpha; default: 32."""
    use_rslora: bool = False
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank)."""
    target_modules: tuple[str, ...] = ()
    """Names of the modules to adapt, such as q_proj; default: all."""
    epochs: int = 1
    """Number of passes over the data."""
    steps: int | None = None
    """Number of steps; takes precedence over `epochs`."""
    batch_size: int = 16
    """Rows per step."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    schedule: ScheduleKind = "linear"
    """Learning-rate schedule after the warmup."""
    warmup: float = 0.0
    """Number of warmup steps, or a fraction of all steps if below 1."""
    grad_clip_norm: float = 1.0
    """Maximum gradient norm; 0 means no clipping."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_tokens: int | None = None
    """Maximum example length; default: the model's context."""
    seed: int = 0
    """Seed of data order, initial weights and samples."""
    save_every: int = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: int | None = None
    """Number of training checkpoints to keep; older ones are deleted. Default: all."""
    eval_data: Path | None = None
    """JSONL file with evaluation data."""
    eval_every: int = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    samples: tuple[str, ...] = ()
    """Prompts to sample at the end; default: the first of the data."""
    sample_tokens: int = 64
    """Maximum tokens of these samples."""
    regularizers: tuple[Regularizer, ...] = ()
    """Terms that are added to the loss; they need torch and a second pass per step."""

    def __post_init__(self) -> None:
        if self.base_model is None and self.start_from is None:
            raise InvalidInput("base_model or start_from is required")
        if self.start_from is not None:
            parse_tinker_path(self.start_from)
        if self.name is not None:
            check_name(self.name)
        if self.schedule not in SCHEDULE_KINDS:
            known = ", ".join(SCHEDULE_KINDS)
            raise InvalidInput(f"schedule is {self.schedule!r}; expected one of {known}")
        for name in ("rank", "epochs", "batch_size", "sample_tokens"):
            check_range(name, getattr(self, name), at_least=1)
        for name in ("save_every", "eval_every"):
            check_range(name, getattr(self, name), at_least=0)
        for name, least in (("steps", 1), ("max_tokens", 2), ("keep_checkpoints", 1)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), at_least=least)
        self._check_lora_options()
        check_range("learning_rate", self.learning_rate, above=0.0)
        check_regularizers(self.regularizers)
        for name in ("warmup", "grad_clip_norm", "weight_decay"):
            check_range(name, getattr(self, name), at_least=0.0)

    def _check_lora_options(self) -> None:
        if self.start_from is not None and self.lora_options():
            names = ", ".join(self.lora_options())
            raise InvalidInput(
                f"{names}: only for a new adapter; {self.start_from} keeps its own settings"
            )
        if self.alpha is not None:
            check_range("alpha", self.alpha, above=0.0)

    @property
    def label(self) -> str:
        """Prefix of checkpoint names."""
        if self.name is not None:
            return self.name
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.data.stem).strip("-.")[:64]
        return f"{self.kind}-{stem}" if stem else self.kind

    def lora_options(self) -> LoraOptions:
        """Return the options of a new adapter that are set."""
        options: LoraOptions = {}
        if self.alpha is not None:
            options["alpha"] = self.alpha
        if self.use_rslora:
            options["use_rslora"] = True
        if self.target_modules:
            options["target_modules"] = list(self.target_modules)
        return options

    @property
    def needs_reference(self) -> bool:
        """True if log-probabilities under the initial weights are needed."""
        return any(term.reference_input is not None for term in self.regularizers)

    def to_dict(self) -> dict[str, object]:
        """Return all settings as plain JSON."""
        settings: dict[str, object] = {"recipe": self.kind, **asdict(self)}
        # Without regularizers the settings, and the name of the run, are as before they existed.
        del settings["regularizers"]
        if self.regularizers:
            settings["regularizers"] = [regularizer_to_dict(term) for term in self.regularizers]
        return {name: _to_plain_json(value) for name, value in settings.items()}

    def training_settings(self) -> dict[str, object]:
        """Return the settings that affect the weights."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in _NON_TRAINING_SETTINGS and (name not in _LORA_OPTIONS or value)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan(Plan):
    """Settings of supervised fine-tuning."""

    kind: ClassVar[str] = "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoPlan(Plan):
    """Settings of direct preference optimization."""

    kind: ClassVar[str] = "dpo"

    learning_rate: float = 1e-5
    beta: float = 0.1
    """Strength of the penalty for leaving the reference."""

    def __post_init__(self) -> None:
        # super() without arguments does not work in a dataclass with slots.
        Plan.__post_init__(self)
        check_range("beta", self.beta, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPlan(Plan):
    """Settings of reinforcement learning with a reward function."""

    kind: ClassVar[str] = "rl"

    learning_rate: float = 1e-5
    schedule: ScheduleKind = "constant"
    reward: str
    """Reward function as FILE.py:FUNCTION."""
    group_size: int = 8
    """Answers per prompt, compared with each other."""
    answer_tokens: int = 128
    """Maximum tokens of an answer."""
    temperature: float = 1.0
    """Sampling temperature."""
    loss: RlLoss = "importance_sampling"
    """Loss function."""

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        if self.loss not in RL_LOSSES:
            known = ", ".join(RL_LOSSES)
            raise InvalidInput(f"loss is {self.loss!r}; expected one of {known}")
        check_range("group_size", self.group_size, at_least=2)
        check_range("answer_tokens", self.answer_tokens, at_least=1)
        check_range("temperature", self.temperature, above=0.0)


def settings_digest(settings: Mapping[str, object]) -> str:
    """Return a short digest of settings."""
    content = msgspec.json.encode(settings, order="sorted")
    return hashlib.sha256(content).hexdigest()[:12]


def describe_changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Describe the settings that differ; missing ones count as None."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _to_plain_json(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
