"""Values and gradients of regularizers: plain torch formulas and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.client.custom_loss import LossHandle, compute_surrogate, trace_loss
from tinkex.errors import InvalidInput
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    LossBatch,
    Orthogonality,
    Regularizer,
    with_regularizers,
)
from tinkex.types import Datum, ModelInput, TensorData

Tensors = list[torch.Tensor]
SCORES = ([-1.0, -2.0, -0.5, -3.0], [-0.7, -0.25, -1.5])
WEIGHTS = ([0.0, 1.0, 2.0, -1.0], [1.0, 1.0, 1.0])
REFERENCE = ([0.0, -1.8, -0.9, -2.0], [-0.5, -0.5, -1.0])


def make_datum(index: int, **more: Any) -> Datum:
    inputs = {
        "target_tokens": list(range(len(SCORES[index]))),
        "weights": WEIGHTS[index],
        "reference_logprobs": REFERENCE[index],
    }
    return Datum(ModelInput.from_ints([1] * len(SCORES[index])), inputs | more)


DATA = [make_datum(0), make_datum(1)]


def base_loss(data: Any, logprobs: Tensors) -> tuple[torch.Tensor, dict[str, float]]:
    return sum((scores**3).sum() for scores in logprobs), {"mine": 1.0}  # type: ignore[return-value]


def leaves(dtype: torch.dtype = torch.float32) -> Tensors:
    return [torch.tensor(scores, dtype=dtype, requires_grad=True) for scores in SCORES]


def flat(logprobs: Tensors) -> torch.Tensor:
    """The six targets with a nonzero weight."""
    return torch.cat([logprobs[0][1:], logprobs[1]])


Q = torch.tensor([*REFERENCE[0][1:], *REFERENCE[1]])


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum() / (a.norm() * b.norm())


def centered_cosine(x: Tensors) -> torch.Tensor:
    return cosine(x[0][1:] - x[0][1:].mean(), x[1] - x[1].mean())


def reverse(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * (x - Q) - x.exp() + Q.exp()


def forward(x: torch.Tensor) -> torch.Tensor:
    return Q.exp() * (Q - x) - Q.exp() + x.exp()


FORMULAS: list[tuple[Regularizer, Callable[[Tensors], torch.Tensor]]] = [
    (L1(weight=1), lambda x: flat(x).abs().mean()),
    (L1(weight=1, reduction="sum"), lambda x: -flat(x).sum()),
    (L1(weight=1, reference="reference_logprobs"), lambda x: (flat(x) - Q).abs().mean()),
    (L2(weight=1), lambda x: (flat(x) ** 2).mean()),
    (L2(weight=1, reference="reference_logprobs"), lambda x: ((flat(x) - Q) ** 2).mean()),
    (
        ElasticNet(weight=1, l1_ratio=0.3),
        lambda x: 0.3 * flat(x).abs().mean() + 0.35 * (flat(x) ** 2).mean(),
    ),
    (Entropy(weight=1), lambda x: (flat(x) * flat(x).exp()).mean()),
    (Entropy(weight=1, goal="minimize"), lambda x: -(flat(x) * flat(x).exp()).mean()),
    (KLDivergence(weight=1), lambda x: ((Q - flat(x)).exp() - 1 - (Q - flat(x))).mean()),
    (
        KLDivergence(weight=1, direction="forward"),
        lambda x: ((flat(x) - Q).exp() - 1 - (flat(x) - Q)).mean(),
    ),
    (KLDivergence(weight=1, estimator="summed"), lambda x: reverse(flat(x)).mean()),
    (
        KLDivergence(weight=1, direction="forward", estimator="summed", reduction="sum"),
        lambda x: forward(flat(x)).sum(),
    ),
    (Consistency(weight=1), lambda x: ((x[0][1:] - x[1]) ** 2).mean()),
    (Consistency(weight=1, distance="absolute"), lambda x: (x[0][1:] - x[1]).abs().mean()),
    (Consistency(weight=1, distance="cosine"), lambda x: 1 - cosine(x[0][1:], x[1])),
    (
        Consistency(weight=1, reference="reference_logprobs"),
        lambda x: ((flat(x) - Q) ** 2).mean(),
    ),
    (Orthogonality(weight=1), lambda x: centered_cosine(x) ** 2),
    (Orthogonality(weight=1, is_centered=False), lambda x: cosine(x[0][1:], x[1]) ** 2),
    (
        GradientPenalty(weight=1, target_norm=2.0),
        lambda x: sum(((3 * each**2).norm() - 2.0) ** 2 for each in x) / 2,  # type: ignore[return-value]
    ),
]


def run_penalty(regularizer: Regularizer, logprobs: Tensors) -> torch.Tensor:
    return regularizer.penalty(LossBatch(DATA, logprobs, base_loss(DATA, logprobs)[0]))


@pytest.mark.parametrize(("regularizer", "formula"), FORMULAS, ids=[str(f[0]) for f in FORMULAS])
def test_value_and_gradient(
    regularizer: Regularizer, formula: Callable[[Tensors], torch.Tensor]
) -> None:
    ours, theirs = leaves(), leaves()
    value, expected = run_penalty(regularizer, ours), formula(theirs)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
    assert sum(float(leaf.grad.abs().sum()) for leaf in ours if leaf.grad is not None) > 0
    # gradcheck compares with finite differences, in float64.
    assert torch.autograd.gradcheck(
        lambda *x: run_penalty(regularizer, list(x)), leaves(torch.float64), eps=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_summed_kl_over_the_vocabulary_is_exact(direction: Any) -> None:
    torch.manual_seed(0)
    model, reference = torch.randn(2, 5, 7).log_softmax(-1)
    inputs = {
        "target_tokens": torch.arange(7).expand(5, 7),
        "weights": torch.ones(5, 7),
        "reference_logprobs": reference,
    }
    datum = Datum(ModelInput.from_ints([1] * 5), inputs)
    batch = LossBatch([datum], [model], model.sum())
    kl = KLDivergence(weight=1, direction=direction, estimator="summed").penalty(batch)
    target, given = (reference, model) if direction == "forward" else (model, reference)
    exact = torch.nn.functional.kl_div(given, target, log_target=True, reduction="batchmean")
    torch.testing.assert_close(kl, exact)
    entropy = Entropy(weight=1, goal="minimize").penalty(batch)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=model).entropy().mean()
    )


def test_regularized_loss_and_metrics() -> None:
    terms = [L2(weight=0.5), Entropy(weight=0.1), KLDivergence(weight=0.0)]
    outputs = [{"logprobs": TensorData.from_numpy(np.array(x, np.float32))} for x in SCORES]
    surrogate = compute_surrogate(DATA, outputs, with_regularizers(base_loss, terms))
    x = leaves()
    parts = {"base": base_loss(DATA, x)[0], "l2": 0.5 * (flat(x) ** 2).mean()}
    parts["entropy"] = 0.1 * (flat(x) * flat(x).exp()).mean()
    norms = {
        name: torch.cat(torch.autograd.grad(part, x, retain_graph=True)).norm().item()
        for name, part in parts.items()
    }
    metrics = surrogate.metrics
    assert surrogate.loss_sum == pytest.approx(sum(part.item() for part in parts.values()))
    assert metrics["mine"] == 1.0
    assert metrics["base_loss"] == pytest.approx(parts["base"].item())
    assert metrics["regularizer/l2"] == pytest.approx(2 * parts["l2"].item())
    assert metrics["base_loss/grad_norm"] == pytest.approx(norms["base"])
    for name in ("l2", "entropy"):
        assert metrics[f"regularizer/{name}/grad_norm"] == pytest.approx(norms[name])
    assert metrics["regularizer/kl_reverse"] > 0
    assert metrics["regularizer/kl_reverse/grad_norm"] == 0.0
    torch.stack(list(parts.values())).sum().backward()
    for datum, leaf in zip(surrogate.data, x, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(
            datum.loss_fn_inputs["weights"].to_numpy(), -leaf.grad.numpy(), rtol=1e-5
        )


def test_gradient_norms_can_be_omitted_and_handles_are_accepted() -> None:
    traced = trace_loss(
        lambda logprobs, weights: ((logprobs * weights).sum(), {}), {"logprobs": 1, "weights": 1}
    )
    handle = LossHandle(traced.name, traced.inputs, "session", traced.graph)
    loss, metrics = with_regularizers(handle, [L1(weight=1)], grad_norms=False)(DATA, leaves())
    assert set(metrics) == {"base_loss", "regularizer/l1"}
    assert loss.item() == pytest.approx(sum(metrics.values()))


def overflow() -> list[Datum]:
    return [make_datum(0), make_datum(1, reference_logprobs=[0.0, 300.0, 0.0])]


@pytest.mark.parametrize(
    ("data", "term", "sentence"),
    [
        (overflow(), KLDivergence(weight=1), "regularizer 'kl_reverse' is inf; it must be finite"),
        (DATA, L1(weight=1, reference="q"), r"data\[0\] has no 'q'"),
        (
            [DATA[0], make_datum(1, reference_logprobs=[1.0])],
            KLDivergence(weight=1),
            r"data\[1\] has 'reference_logprobs' of shape \[1\]",
        ),
        (
            [DATA[0], make_datum(1, weights=[1.0, 0.0, 1.0])],
            Consistency(weight=1),
            r"data\[0\] has 3 selected targets and data\[1\] has 2",
        ),
    ],
)
def test_unusable_data_is_rejected(data: list[Datum], term: Regularizer, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        with_regularizers(base_loss, [term])(data, leaves())


def test_consistency_needs_pairs() -> None:
    with pytest.raises(InvalidInput, match="the batch has 1"):
        with_regularizers(base_loss, [Consistency(weight=1)])(DATA[:1], leaves()[:1])
