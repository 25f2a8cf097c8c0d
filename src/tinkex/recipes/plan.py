"""What a fine-tune is to do: every setting, checked when it is made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from tinkex.errors import InvalidInput
from tinkex.ids import check_name, parse_tinker_path
from tinkex.schedules import SCHEDULE_KINDS, ScheduleKind
from tinkex.types.optimizers import check_range

RlLoss = Literal["importance_sampling", "ppo", "cispo"]
RL_LOSSES = ("importance_sampling", "ppo", "cispo")
#: Settings that change what is told or kept and not what is learned.
_NON_TRAINING_SETTINGS = frozenset(
    {"save_every", "eval_data", "eval_every", "samples", "sample_tokens", "data", "reward"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings that all recipes share."""

    kind: ClassVar[str] = ""

    data: Path
    """The JSONL file to learn from."""
    base_model: str | None = None
    """The model to adapt; may be left out when `start_from` names a checkpoint."""
    start_from: str | None = None
    """A tinker:// path of training weights to start from, with a fresh optimizer."""
    name: str | None = None
    """The name that checkpoints begin with; by default the recipe and the data file's name."""
    rank: int = 32
    """The inner dimension of the adapter."""
    epochs: int = 1
    """How often every row is seen."""
    steps: int | None = None
    """How many steps to take, whatever `epochs` says."""
    batch_size: int = 16
    """How many rows go into one step."""
    learning_rate: float = 1e-4
    """The largest learning rate."""
    schedule: ScheduleKind = "linear"
    """What follows the warm-up."""
    warmup: float = 0.0
    """Below 1 a share of all steps, otherwise a number of steps."""
    grad_clip_norm: float = 1.0
    """The largest gradient norm; 0 clips nothing."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_tokens: int | None = None
    """Longer examples are cut; by default to what the model can read."""
    seed: int = 0
    """Makes order, first weights and samples repeatable."""
    save_every: int = 50
    """A checkpoint after so many steps; 0 saves at the end only."""
    eval_data: Path | None = None
    """A file of the same kind that is measured and not learned."""
    eval_every: int = 50
    """Measure after so many steps, and at the end; 0 measures at the end only."""
    samples: tuple[str, ...] = ()
    """Prompts to answer at the end; by default the first of the data."""
    sample_tokens: int = 64
    """How long these answers may be."""

    def __post_init__(self) -> None:
        if self.base_model is None and self.start_from is None:
            raise InvalidInput("a fine-tune needs a base model, or a checkpoint to start from")
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
        for name, least in (("steps", 1), ("max_tokens", 2)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), at_least=least)
        check_range("learning_rate", self.learning_rate, above=0.0)
        for name in ("warmup", "grad_clip_norm", "weight_decay"):
            check_range(name, getattr(self, name), at_least=0.0)

    @property
    def label(self) -> str:
        """What checkpoints are called."""
        if self.name is not None:
            return self.name
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.data.stem).strip("-.")[:64]
        return f"{self.kind}-{stem}" if stem else self.kind

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON has them."""
        settings = {"recipe": self.kind, **asdict(self)}
        return {name: _to_plain_json(value) for name, value in settings.items()}

    def training_settings(self) -> dict[str, Any]:
        """The settings that change what is learned."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in _NON_TRAINING_SETTINGS
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPlan(Plan):
    """Learn to say what the data says."""

    kind: ClassVar[str] = "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoPlan(Plan):
    """Learn to prefer the chosen answers, by direct preference optimization."""

    kind: ClassVar[str] = "dpo"

    learning_rate: float = 1e-5
    beta: float = 0.1
    """How far the model may move from where it started: less moves further."""

    def __post_init__(self) -> None:
        # A dataclass with slots is made anew, which super() without arguments does not know.
        Plan.__post_init__(self)
        check_range("beta", self.beta, above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPlan(Plan):
    """Learn to answer so that a function of your own gives higher rewards."""

    kind: ClassVar[str] = "rl"

    learning_rate: float = 1e-5
    schedule: ScheduleKind = "constant"
    reward: str
    """The reward function: FILE.py:FUNCTION."""
    group_size: int = 8
    """How many answers are drawn for a prompt and compared with each other."""
    answer_tokens: int = 128
    """How long an answer may be."""
    temperature: float = 1.0
    """How the answers are drawn."""
    loss: RlLoss = "importance_sampling"
    """The objective."""

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        if self.loss not in RL_LOSSES:
            known = ", ".join(RL_LOSSES)
            raise InvalidInput(f"loss is {self.loss!r}; expected one of {known}")
        check_range("group_size", self.group_size, at_least=2)
        check_range("answer_tokens", self.answer_tokens, at_least=1)
        check_range("temperature", self.temperature, above=0.0)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """The same short text for the same settings."""
    content = msgspec.json.encode(settings, order="sorted")
    return hashlib.sha256(content).hexdigest()[:12]


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, in words; a setting that one side does not know counts as None."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _to_plain_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
