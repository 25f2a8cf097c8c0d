"""A bigram language model for tests: one row of logits per previous token.

All computations are exact and cheap. The log-probabilities of all pairs are one table, and the
gradient of a loss is a scatter into that table minus the softmax of each row.

Shape letters: V vocabulary, P pairs of (previous token, next token) of all examples.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tinkex.engine.examples import parse_examples
from tinkex.engine.fake.toy_tokenizer import VOCAB_SIZE
from tinkex.engine.losses import check_loss, compute_loss, sum_metrics
from tinkex.engine.micro_batches import pack_examples
from tinkex.errors import InvalidInput
from tinkex.types import (
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
)

Floats: TypeAlias = npt.NDArray[np.float64]
Tokens: TypeAlias = npt.NDArray[np.int64]

#: Practically impossible, but finite, because not every wire format can represent infinity.
_LOWEST_LOGIT = -1e6
#: Log-probabilities of larger weights overflow float32.
_LARGEST_NORM = 1e30
#: The token for every position of an image or audio chunk.
PLACEHOLDER_TOKEN = 511


# --- the model and its training ------------------------------------------------------------------


class Bigram:
    """Immutable weights; training creates a new object, so a copy is just a reference."""

    def __init__(self, logits_VV: Floats) -> None:
        logits_VV.setflags(write=False)
        self.logits_VV = logits_VV

    @classmethod
    def base(cls, name: str, vocab_size: int = VOCAB_SIZE) -> Bigram:
        """The base model of this name: random logits that are the same in every process."""
        return cls(_base_logits(name, vocab_size))

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

    @cached_property
    def entropy_V(self) -> Floats:
        """The entropy of the next token after each token, in nats."""
        entropies_V: Floats = -(self.probs_VV * self.logprobs_VV).sum(axis=1)
        return entropies_V

    def with_temperature(self, temperature: float) -> Bigram:
        """The model at another temperature; logits are limited to stay finite."""
        top_V1 = self.logits_VV.max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):
            scaled_VV = (self.logits_VV - top_V1) / temperature
        return Bigram(np.maximum(scaled_VV, _LOWEST_LOGIT))

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.logits_VV)

    def gradient(self, previous_P: Tokens, next_P: Tokens, grad_P: Floats) -> Floats:
        """The gradient by the logits, given the gradient by each pair's log-probability."""
        size = self.vocab_size
        cells = np.bincount(previous_P * size + next_P, weights=grad_P, minlength=size * size)
        rows_V = np.bincount(previous_P, weights=grad_P, minlength=size)
        table_VV: Floats = cells.reshape(size, size) - rows_V[:, None] * self.probs_VV
        return table_VV


@lru_cache(maxsize=8)
def _base_logits(name: str, vocab_size: int) -> Floats:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.normal(scale=0.5, size=(vocab_size, vocab_size))


class Moments(NamedTuple):
    """The optimizer's state between steps."""

    num_steps: int = 0
    first_VV: Floats | None = None
    second_VV: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepParams:
    """The hyperparameters of one optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(slots=True)
class BigramTrainer:
    """A model in training: weights, accumulated gradient and optimizer state."""

    model: Bigram
    moments: Moments = field(default_factory=Moments)
    gradient_VV: Floats | None = None

    def accumulate(self, gradient_VV: Floats) -> None:
        """Add to the gradient of the next step; raises InvalidInput if the sum is not finite."""
        old_VV = self.gradient_VV
        with np.errstate(over="ignore", invalid="ignore"):
            total_VV = gradient_VV if old_VV is None else old_VV + gradient_VV
        if not math.isfinite(_norm(total_VV)):
            raise InvalidInput("the gradient is not finite; scale the loss inputs down")
        self.gradient_VV = total_VV

    def load(self, model: Bigram, moments: Moments | None) -> None:
        """Replace the weights; without moments the optimizer state is reset."""
        self.model, self.moments, self.gradient_VV = model, moments or Moments(), None

    def adamw_step(self, params: OptimStepParams) -> dict[str, float]:
        """Take an AdamW step with decoupled weight decay, and clear the gradient."""
        return self._step(_adamw_update, params)

    def momentum_step(self, params: OptimStepParams) -> dict[str, float]:
        """Take a step along the normalized momentum, for optimizers other than AdamW."""
        return self._step(_momentum_update, params)

    def _step(self, update_rule: _UpdateRule, params: OptimStepParams) -> dict[str, float]:
        """Take a step, or raise InvalidInput and change nothing."""
        old_VV, gradient_VV = self.model.logits_VV, self.gradient_VV
        has_gradient = gradient_VV is not None
        if gradient_VV is None:
            gradient_VV = np.zeros_like(old_VV)
        norm = _norm(gradient_VV)
        if not math.isfinite(norm):
            raise InvalidInput(f"the gradient's norm is {norm}; load saved weights to drop it")
        with np.errstate(all="ignore"):
            if 0.0 < params.grad_clip_norm < norm:
                gradient_VV = gradient_VV * (params.grad_clip_norm / norm)
            logits_VV, moments = update_rule(old_VV, self.moments, gradient_VV, params)
            metrics = {
                "grad_norm": norm,
                "learning_rate": params.learning_rate,
                "param_norm": _norm(logits_VV),
                "update_norm": _norm(logits_VV - old_VV),
                "step": float(moments.num_steps),
                "has_gradient": float(has_gradient),
            }
        _check_step(metrics, moments)
        self.model, self.moments, self.gradient_VV = Bigram(logits_VV), moments, None
        return metrics


_UpdateRule: TypeAlias = Callable[
    [Floats, Moments, Floats, OptimStepParams], tuple[Floats, Moments]
]


def _adamw_update(
    logits_VV: Floats, old: Moments, gradient_VV: Floats, params: OptimStepParams
) -> tuple[Floats, Moments]:
    step = old.num_steps + 1
    first_VV = _moving_average(old.first_VV, gradient_VV, params.beta1)
    second_VV = _moving_average(old.second_VV, gradient_VV**2, params.beta2)
    mean_VV = first_VV / (1.0 - params.beta1**step)
    scale_VV = np.sqrt(second_VV / (1.0 - params.beta2**step)) + params.eps
    decayed_VV = logits_VV * (1.0 - params.learning_rate * params.weight_decay)
    return decayed_VV - params.learning_rate * mean_VV / scale_VV, Moments(
        step, first_VV, second_VV
    )


def _momentum_update(
    logits_VV: Floats, old: Moments, gradient_VV: Floats, params: OptimStepParams
) -> tuple[Floats, Moments]:
    first_VV = _moving_average(old.first_VV, gradient_VV, params.beta1)
    rms = float(np.sqrt((first_VV**2).mean()))
    moved_VV = logits_VV
    if rms > 0.0:
        moved_VV = logits_VV - params.learning_rate * first_VV / rms
    return moved_VV, Moments(old.num_steps + 1, first_VV)


def _moving_average(old_VV: Floats | None, new_VV: Floats, decay: float) -> Floats:
    blended_VV: Floats = (1.0 - decay) * new_VV
    return blended_VV if old_VV is None else decay * old_VV + blended_VV


def _norm(table_VV: Floats) -> float:
    # Not BLAS: its sums depend on the number of threads, and results must be bit-identical.
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(float(np.square(table_VV).sum()))


def _check_step(metrics: Mapping[str, float], moments: Moments) -> None:
    tables = (table for table in (moments.first_VV, moments.second_VV) if table is not None)
    is_small = metrics["param_norm"] <= _LARGEST_NORM and math.isfinite(metrics["update_norm"])
    if not is_small or not all(math.isfinite(_norm(table_VV)) for table_VV in tables):
        raise InvalidInput(
            f"a step of learning_rate {metrics['learning_rate']:g} along a gradient of norm "
            f"{metrics['grad_norm']:g} overflows; nothing was changed"
        )


# --- scores of examples and prompts --------------------------------------------------------------


def flatten_tokens(model_input: ModelInput) -> list[int]:
    """The tokens of a prompt, with placeholders for chunks that are not text."""
    chunks = model_input.chunks
    if len(chunks) == 1 and isinstance(chunks[0], EncodedTextChunk):
        return list(chunks[0].tokens)
    tokens: list[int] = []
    for chunk in chunks:
        if isinstance(chunk, EncodedTextChunk):
            tokens.extend(chunk.tokens)
        else:
            tokens.extend([PLACEHOLDER_TOKEN] * chunk.length)
    return tokens


def run_pass(
    trainer: BigramTrainer,
    request: ForwardBackwardInput,
    *,
    forward_only: bool,
    max_context_tokens: int = sys.maxsize,
) -> ForwardBackwardOutput:
    """Score the examples and, unless `forward_only`, accumulate their gradient.

    Raises InvalidInput if an example cannot be scored; then nothing is accumulated.
    """
    model = trainer.model
    examples = parse_examples(
        request, vocab_size=model.vocab_size, max_context_tokens=max_context_tokens
    )
    packed = pack_examples(examples)
    previous_P = packed.tokens_T[packed.rows_P]
    parts = packed.split_by_example(model.logprobs_VV[previous_P, packed.targets_P])
    loss = compute_loss(request, examples, parts)
    check_loss(request.loss_fn, loss)
    if not forward_only:
        # `accumulate` reports non-finite values, so NumPy need not warn about them.
        with np.errstate(all="ignore"):
            trainer.accumulate(model.gradient(previous_P, packed.targets_P, loss.grad_P))
    metrics = {
        **sum_metrics([loss]),
        "tokens:sum": float(len(packed.tokens_T)),
        "entropy:mean": float(model.entropy_V[packed.tokens_T].mean()),
    }
    outputs = [example.to_output(part) for example, part in zip(examples, parts, strict=True)]
    return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


def score_tokens(model: Bigram, tokens: Tokens) -> Floats:
    """The log-probability of every token but the first, given its predecessor."""
    scores: Floats = model.logprobs_VV[tokens[:-1], tokens[1:]]
    return scores
