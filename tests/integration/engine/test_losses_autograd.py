"""Every loss and its gradient against the same formula in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tinkex.engine.examples import parse_examples
from tinkex.engine.losses import LOSSES, compute_loss, sum_metrics
from tinkex.types import Datum, ForwardBackwardInput, ModelInput, TensorData

VOCAB_SIZE = 50
Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


# --- the formulas for one example, with torch autograd ---------------------------------------
def ref_cross_entropy(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(t * inputs.get("weights", torch.ones_like(t))).sum()


def ref_importance_sampling(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(torch.exp(t - inputs["logprobs"]) * inputs["advantages"]).sum()


def ref_clamped(ratio: Tensor, inputs: Inputs, config: Config, low: float, high: float) -> Tensor:
    lows = torch.full_like(ratio, config.get("clip_low_threshold", low))
    highs = torch.full_like(ratio, config.get("clip_high_threshold", high))
    return torch.clamp(
        ratio,
        min=inputs.get("clip_low_threshold", lows),
        max=inputs.get("clip_high_threshold", highs),
    )


def ref_ppo(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio, advantages = torch.exp(t - inputs["logprobs"]), inputs["advantages"]
    held = ref_clamped(ratio, inputs, config, 0.8, 1.2)
    return -torch.minimum(ratio * advantages, held * advantages).sum()


def ref_cispo(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = torch.exp(t - inputs["logprobs"])
    held = ref_clamped(ratio, inputs, config, 0.0, 4.0).detach()
    return -(held * t * inputs["advantages"]).sum()


def ref_dro(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    drift = t - inputs["logprobs"]
    return -(t * inputs["advantages"] - 0.5 * config.get("beta", 0.05) * drift**2).sum()


def ref_gspo(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    drift = t.detach() - inputs["logprobs"]
    mask = inputs.get("sequence_ratio_mask", torch.ones_like(t)) != 0
    mean = drift[mask].mean() if bool(mask.any()) else torch.zeros((), dtype=t.dtype)
    ratio, advantages = torch.exp(mean + t - t.detach()), inputs["advantages"]
    held = ref_clamped(ratio, inputs, config, 0.8, 1.2)
    return -torch.minimum(ratio * advantages, held * advantages).sum()


def ref_stable_reinforce(t: Tensor, inputs: Inputs, config: Config) -> Tensor:
    drift, advantages = t - inputs["logprobs"], inputs["advantages"]
    line = 9.0 - np.log(10.0) + 9.0 * (drift - np.log(10.0))
    penalty = torch.where(drift > np.log(10.0), line, torch.exp(drift) - 1.0 - drift)
    weight = torch.clamp(torch.exp(drift), max=1.0).detach()
    per_token = -weight * advantages * t + config.get("kl_coeff", 0.01) * penalty
    return per_token[advantages != 0.0].sum()


REFERENCES: Mapping[str, Callable[[Tensor, Inputs, Config], Tensor]] = {
    "cross_entropy": ref_cross_entropy,
    "importance_sampling": ref_importance_sampling,
    "ppo": ref_ppo,
    "cispo": ref_cispo,
    "dro": ref_dro,
    "gspo": ref_gspo,
    "stable_reinforce": ref_stable_reinforce,
}


# --- requests --------------------------------------------------------------------------------
SHAPES = [(5,), (1,), (4, 3), (7,), (5,), (2, 6)]
RATIO = ("logprobs", "advantages")
CLIPS = ("clip_low_threshold", "clip_high_threshold")
CASES: Sequence[tuple[str, tuple[str, ...], Config]] = [
    ("cross_entropy", (), {}),
    ("cross_entropy", ("weights",), {}),
    ("importance_sampling", RATIO, {}),
    ("ppo", RATIO, {}),
    ("ppo", RATIO, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}),
    ("ppo", (*RATIO, *CLIPS), {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}),
    ("ppo", (*RATIO, "clip_high_threshold"), {"clip_low_threshold": 0.9}),
    ("cispo", RATIO, {}),
    ("cispo", RATIO, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("cispo", (*RATIO, *CLIPS), {}),
    ("dro", RATIO, {}),
    ("dro", RATIO, {"beta": 2.5}),
    ("gspo", RATIO, {}),
    ("gspo", (*RATIO, "sequence_ratio_mask"), {}),
    ("gspo", (*RATIO, "sequence_ratio_mask", *CLIPS), {}),
    ("gspo", (*RATIO, "sequence_ratio_mask"), {"clip_low_threshold": 0.99}),
    ("stable_reinforce", RATIO, {}),
    ("stable_reinforce", RATIO, {"kl_coeff": 3.0}),
]
DRAWS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    # Weights, advantages and masks are sometimes zero, as they are for prompts.
    "weights": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) > 0.4),
    "advantages": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) > 0.3),
    "logprobs": lambda rng, shape: -rng.exponential(1.5, size=shape),
    "clip_low_threshold": lambda rng, shape: rng.uniform(0.5, 1.0, size=shape),
    "clip_high_threshold": lambda rng, shape: rng.uniform(1.0, 1.5, size=shape),
    "sequence_ratio_mask": lambda rng, shape: (rng.random(shape) > 0.5).astype(float),
}


class Trial:
    """A request, log-probabilities for it, and the expected results of torch."""

    def __init__(self, loss_fn: str, names: Sequence[str], config: Config, seed: int) -> None:
        rng = np.random.default_rng(seed)
        data = [_datum(rng, shape, names) for shape in SHAPES]
        self.work = ForwardBackwardInput(data, loss_fn, dict(config))  # type: ignore[arg-type]
        self.examples = parse_examples(self.work, vocab_size=VOCAB_SIZE, max_context_tokens=99)
        self.logprobs = [_now(rng, datum, names) for datum in data]
        self.values: list[float] = []
        self.slopes: list[np.ndarray] = []
        for datum, now in zip(data, self.logprobs, strict=True):
            t = torch.from_numpy(now).clone().requires_grad_()
            inputs = {name: datum.loss_fn_inputs[name].to_torch().double() for name in names}
            value = REFERENCES[loss_fn](t, inputs, config)
            value.backward()
            assert t.grad is not None
            self.values.append(value.item())
            self.slopes.append(t.grad.numpy().ravel())


def _datum(rng: np.random.Generator, shape: tuple[int, ...], names: Sequence[str]) -> Datum:
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, VOCAB_SIZE, size=shape)}
    inputs |= {name: DRAWS[name](rng, shape) for name in names}
    return Datum(ModelInput.from_ints(rng.integers(0, VOCAB_SIZE, size=shape[0])), inputs)  # type: ignore[arg-type]


def _now(rng: np.random.Generator, datum: Datum, names: Sequence[str]) -> np.ndarray:
    """Log-probabilities near those at sampling time, so that some ratios are clipped."""
    shape = datum.loss_fn_inputs["target_tokens"].shape
    if "logprobs" not in names:
        return -rng.exponential(1.5, size=shape)
    return datum.loss_fn_inputs["logprobs"].to_numpy() + rng.normal(scale=0.3, size=shape)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("loss_fn", "names", "config"), CASES)
def test_value_and_grad_match_autograd(
    loss_fn: str, names: Sequence[str], config: Config, seed: int
) -> None:
    trial = Trial(loss_fn, names, config, seed)
    loss = compute_loss(trial.work, trial.examples, trial.logprobs)
    assert loss.value == pytest.approx(sum(trial.values), abs=1e-5, rel=1e-5)
    np.testing.assert_allclose(loss.grad_P, np.concatenate(trial.slopes), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("loss_fn", "names", "config"), CASES)
def test_subset_contributes_its_share_of_value_and_grad(
    loss_fn: str, names: Sequence[str], config: Config
) -> None:
    trial = Trial(loss_fn, names, config, seed=7)
    whole = compute_loss(trial.work, trial.examples, trial.logprobs)
    parts = []
    for subset in ([4, 0], [5], [2, 1, 3]):
        examples = [trial.examples[index] for index in subset]
        loss = compute_loss(trial.work, examples, [trial.logprobs[index] for index in subset])
        expected = np.concatenate([trial.slopes[index] for index in subset])
        assert loss.value == pytest.approx(
            sum(trial.values[index] for index in subset), abs=1e-5, rel=1e-5
        )
        np.testing.assert_allclose(loss.grad_P, expected, atol=1e-5, rtol=1e-5)
        parts.append(loss)
    assert sum_metrics(parts) == pytest.approx(sum_metrics([whole]))


def test_every_loss_is_tested() -> None:
    assert {name for name, _, _ in CASES} == set(LOSSES) == set(REFERENCES)
    used = {name for _, names, _ in CASES for name in names}
    assert used == {
        name for loss in LOSSES.values() for name in (*loss.required_inputs, *loss.optional_inputs)
    }


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_example_data_clips_some_ratios(loss_fn: str) -> None:
    trial = Trial(loss_fn, (*RATIO, *CLIPS), {}, seed=0)
    metrics = compute_loss(trial.work, trial.examples, trial.logprobs).metrics
    assert 0.0 < metrics["clip_fraction:mean"] < 1.0


def test_sparse_soft_targets_equal_dense() -> None:
    weights = np.zeros((6, 8), dtype=np.float32)
    weights[np.arange(6), np.arange(6)] = [0.5, 0.25, 1.0, 0.0, 0.75, 2.0]
    targets = np.where(weights != 0, 7, 0)
    logprobs = np.random.default_rng(0).normal(size=(6, 8))
    t = torch.from_numpy(logprobs).clone().requires_grad_()
    expected = ref_cross_entropy(t, {"weights": torch.from_numpy(weights)}, {})
    expected.backward()
    for make in (TensorData.from_numpy, TensorData.from_numpy_sparse):
        tensors = {"target_tokens": make(targets), "weights": make(weights)}
        assert tensors["weights"].is_sparse == (make == TensorData.from_numpy_sparse)
        work = ForwardBackwardInput(
            [Datum(ModelInput.from_ints([1, 2, 3, 4, 5, 6]), tensors)], "cross_entropy"
        )
        examples = parse_examples(work, vocab_size=VOCAB_SIZE, max_context_tokens=99)
        loss = compute_loss(work, examples, [logprobs])
        assert loss.value == pytest.approx(expected.item(), abs=1e-5)
        assert t.grad is not None
        np.testing.assert_allclose(loss.grad_P, t.grad.numpy().ravel(), atol=1e-5)
