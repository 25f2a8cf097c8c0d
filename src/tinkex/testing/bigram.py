"""A language model small enough for a test: one row of logits per previous token.

Everything a trainer needs is exact and cheap. The log-probabilities of all pairs are one table, and
the gradient of any loss of them is a scatter into that table minus each row's share of the softmax.

Shape letters: V vocabulary, P pairs of (previous token, next token).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tinkex.testing.toy_tokenizer import VOCAB_SIZE

Floats: TypeAlias = npt.NDArray[np.float64]
Tokens: TypeAlias = npt.NDArray[np.int64]


class Bigram:
    """Weights that never change; training makes a new one, so a checkpoint is a reference."""

    def __init__(self, logits_VV: Floats) -> None:
        logits_VV.setflags(write=False)
        self.logits_VV = logits_VV

    @classmethod
    def base(cls, name: str, vocab_size: int = VOCAB_SIZE) -> Bigram:
        """The base model of this name: mild random preferences, the same in every process."""
        dice = np.random.default_rng(zlib.crc32(name.encode()))
        return cls(dice.normal(scale=0.5, size=(vocab_size, vocab_size)))

    @cached_property
    def logprobs_VV(self) -> Floats:
        """Row: previous token; column: log-probability of the next one."""
        top_V1 = self.logits_VV.max(axis=1, keepdims=True)
        shifted_VV = self.logits_VV - top_V1
        table_VV: Floats = shifted_VV - np.log(np.exp(shifted_VV).sum(axis=1, keepdims=True))
        table_VV.setflags(write=False)
        return table_VV

    @cached_property
    def probs_VV(self) -> Floats:
        """Row: previous token; column: probability of the next one."""
        table_VV: Floats = np.exp(self.logprobs_VV)
        return table_VV

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return len(self.logits_VV)

    def gradient(self, previous_P: Tokens, next_P: Tokens, slope_P: Floats) -> Floats:
        """The gradient by the logits of a loss whose slope by each pair's log-prob is given."""
        size = self.vocab_size
        cells = np.bincount(previous_P * size + next_P, weights=slope_P, minlength=size * size)
        rows_V = np.bincount(previous_P, weights=slope_P, minlength=size)
        table_VV: Floats = cells.reshape(size, size) - rows_V[:, None] * self.probs_VV
        return table_VV


class Moments(NamedTuple):
    """What an optimizer remembers between steps."""

    num_steps: int = 0
    first_VV: Floats | None = None
    second_VV: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The numbers of one optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(slots=True)
class Trainer:
    """A model in training: weights, the gradient gathered so far, and the optimizer's memory."""

    model: Bigram
    moments: Moments = field(default_factory=Moments)
    gradient_VV: Floats | None = None

    def accumulate(self, gradient_VV: Floats) -> None:
        """Add to the gradient of the next step."""
        seen_VV = self.gradient_VV
        self.gradient_VV = gradient_VV if seen_VV is None else seen_VV + gradient_VV

    def load(self, model: Bigram, moments: Moments | None) -> None:
        """Go on from other weights; without their moments the optimizer starts afresh."""
        self.model, self.moments, self.gradient_VV = model, moments or Moments(), None

    def adamw_step(self, size: StepSize) -> dict[str, float]:
        """One AdamW step with decoupled weight decay; the gradient is used up."""
        gradient_VV, norm = self._take_gradient(size.grad_clip_norm)
        step = self.moments.num_steps + 1
        first_VV = _blend(self.moments.first_VV, gradient_VV, size.beta1)
        second_VV = _blend(self.moments.second_VV, gradient_VV**2, size.beta2)
        mean_VV = first_VV / (1.0 - size.beta1**step)
        scale_VV = np.sqrt(second_VV / (1.0 - size.beta2**step)) + size.eps
        kept_VV = self.model.logits_VV * (1.0 - size.learning_rate * size.weight_decay)
        self.model = Bigram(kept_VV - size.learning_rate * mean_VV / scale_VV)
        self.moments = Moments(step, first_VV, second_VV)
        return _step_metrics(norm, size.learning_rate, step)

    def momentum_step(self, size: StepSize) -> dict[str, float]:
        """One step along the normalized momentum, for optimizers other than AdamW."""
        gradient_VV, norm = self._take_gradient(size.grad_clip_norm)
        step = self.moments.num_steps + 1
        first_VV = _blend(self.moments.first_VV, gradient_VV, size.beta1)
        length = float(np.sqrt((first_VV**2).mean()))
        if length > 0.0:
            moved_VV = self.model.logits_VV - size.learning_rate * first_VV / length
            self.model = Bigram(moved_VV)
        self.moments = Moments(step, first_VV)
        return _step_metrics(norm, size.learning_rate, step)

    def _take_gradient(self, clip_norm: float) -> tuple[Floats, float]:
        gradient_VV = self.gradient_VV
        self.gradient_VV = None
        if gradient_VV is None:
            return np.zeros_like(self.model.logits_VV), 0.0
        norm = float(np.sqrt((gradient_VV**2).sum()))
        if 0.0 < clip_norm < norm:
            gradient_VV = gradient_VV * (clip_norm / norm)
        return gradient_VV, norm


def _blend(old_VV: Floats | None, new_VV: Floats, keep: float) -> Floats:
    blended_VV: Floats = (1.0 - keep) * new_VV
    return blended_VV if old_VV is None else keep * old_VV + blended_VV


def _step_metrics(norm: float, learning_rate: float, step: int) -> dict[str, float]:
    return {"grad_norm": norm, "learning_rate": learning_rate, "step": float(step)}


def check_tokens(what: str, tokens: Any, vocab_size: int) -> Tokens:
    """The tokens as an array, or a ValueError that names the one the model does not have."""
    array: Tokens = np.asarray(tokens, dtype=np.int64)
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        raise ValueError(
            f"{what} has token {array[wrong].flat[0]}, outside the vocabulary of {vocab_size}"
        )
    return array
