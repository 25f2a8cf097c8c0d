"""Custom losses with torch: same results as the official SDK, exact gradients."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker.lib.public_interfaces import custom_loss as official

from tinkex.client.custom_loss import (
    LossHandle,
    compute_surrogate,
    forward_data,
    run_loss_handle,
    trace_loss,
)
from tinkex.errors import APIResponseValidationError, InvalidInput
from tinkex.types import Datum, ModelInput, SampledProvenanceSpan, TensorData

Loss = Callable[..., Any]


# --- running a handle ---------------------------------------------------------------------


def make_handle(fn: Loss, **ranks: Any) -> LossHandle:
    traced = trace_loss(fn, ranks)
    return LossHandle(traced.name, traced.inputs, "session", traced.graph)


def make_datum(**loss_fn_inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints([1, 2, 3]), loss_fn_inputs)


def weighted_nll(logprobs, weights, scale):
    loss = -(logprobs * weights).sum() * scale
    return loss, {"custom/nll:sum": loss, "custom/nll:mean": loss}


WEIGHTED = [
    make_datum(target_tokens=[4, 5], weights=[1.0, 2.0], scale=TensorData([1.0], "float32", [])),
    make_datum(
        target_tokens=[6, 7, 8], weights=[0.5, 0.0, 1.0], scale=TensorData([3.0], "float32", [])
    ),
]


def test_handle_runs_like_official() -> None:
    ranks = {"logprobs": 1, "weights": 1, "scale": 0}
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -4.0, -0.25])]
    theirs_data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1]),
            loss_fn_inputs={k: v.to_torch() for k, v in each.loss_fn_inputs.items()},
        )
        for each in WEIGHTED
    ]
    theirs = official.run_loss_handle(
        official.trace_loss(weighted_nll, ranks, "s"), theirs_data, logprobs
    )
    ours = run_loss_handle(make_handle(weighted_nll, **ranks), WEIGHTED, logprobs)
    assert ours[0].item() == theirs[0].item() == 6.5
    assert ours[1] == theirs[1] == {"custom/nll:sum": 6.5, "custom/nll:mean": 3.25}


def test_handle_can_be_pickled() -> None:
    handle = make_handle(weighted_nll, logprobs=1, weights=1, scale=0)
    again = pickle.loads(pickle.dumps(handle))
    assert (again, again.key) == (handle, handle.key)
    logprobs = [torch.tensor([-1.0, -2.0]), torch.zeros(3)]
    assert run_loss_handle(again, WEIGHTED, logprobs)[0].item() == 5.0


def test_handle_does_not_modify_user_data() -> None:
    def doubles(logprobs, weights):
        return (logprobs * weights.mul_(2)).sum(), {}

    loss = run_loss_handle(
        make_handle(doubles, logprobs=1, weights=1), WEIGHTED[:1], [torch.ones(2)]
    )[0]
    assert loss.item() == 6.0
    assert WEIGHTED[0].loss_fn_inputs["weights"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "returns",
    [lambda logprobs: (logprobs * 2, {}), lambda logprobs: (math.exp(logprobs.sum()), {})],
)
def test_handle_must_return_scalar_tensor(returns: Loss) -> None:
    with pytest.raises(InvalidInput, match=r"for data\[0\]; expected a scalar tensor"):
        run_loss_handle(make_handle(returns, logprobs=1), WEIGHTED[:1], [torch.ones(2)])


# --- gradients ----------------------------------------------------------------------------


def outputs_of(*logprobs: Any) -> list[dict[str, TensorData]]:
    return [{"logprobs": TensorData.from_numpy(np.array(each, np.float32))} for each in logprobs]


DATA = [make_datum(target_tokens=[4, 5, 6]), make_datum(target_tokens=[7, 8])]
OUTPUTS = outputs_of([-1.0, -2.0, -0.5], [-3.0, -0.25])


def square_and_exp(data, logprobs):
    loss = (logprobs[0] ** 2).sum() + logprobs[0][0] * logprobs[1].exp().sum()
    return loss, {"first": logprobs[0][0], "count": len(data), "np": np.float32(0.5), "yes": True}


def test_weights_are_the_negative_gradient() -> None:
    surrogate = compute_surrogate(DATA, OUTPUTS, square_and_exp)
    x = np.array([-1.0, -2.0, -0.5])
    y = np.array([-3.0, -0.25])
    first = 2 * x
    first[0] += np.exp(y).sum()
    expected = [-first, -(x[0] * np.exp(y))]
    for datum, given, weights in zip(surrogate.data, DATA, expected, strict=True):
        np.testing.assert_allclose(datum.loss_fn_inputs["weights"].to_numpy(), weights, rtol=1e-6)
        assert datum.loss_fn_inputs["target_tokens"] == given.loss_fn_inputs["target_tokens"]
        assert datum.model_input is given.model_input
    assert surrogate.loss_sum == pytest.approx((x**2).sum() + x[0] * np.exp(y).sum())
    assert surrogate.metrics == {"first": -1.0, "count": 2.0, "np": 0.5, "yes": 1.0}


def test_surrogate_gradient_equals_autograd() -> None:
    """With logits as the model: the surrogate gives the same gradient as the custom loss."""
    torch.manual_seed(0)
    logits_TV = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([3, 1, 4, 1, 5])
    advantages = torch.randn(5, dtype=torch.float64)

    def logprobs() -> torch.Tensor:
        return torch.log_softmax(logits_TV, -1).gather(1, targets[:, None]).squeeze(1)

    def loss_fn(data, logprobs):
        ratio = torch.exp(logprobs[0] + 2.0)
        return -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantages).sum(), {}

    [direct] = torch.autograd.grad(loss_fn(None, [logprobs()])[0], [logits_TV])
    datum = Datum(ModelInput.from_ints([0] * 5), {"target_tokens": targets})
    output = {"logprobs": TensorData.from_torch(logprobs())}
    [weighted] = compute_surrogate([datum], [output], loss_fn).data
    cross_entropy = -(weighted.loss_fn_inputs["weights"].to_torch() * logprobs()).sum()
    [through_weights] = torch.autograd.grad(cross_entropy, [logits_TV])
    torch.testing.assert_close(through_weights, direct, rtol=1e-5, atol=1e-6)
    assert direct.abs().sum() > 0


def test_handle_gradient_equals_function_gradient() -> None:
    handle = make_handle(weighted_nll, logprobs=1, weights=1, scale=0)
    surrogate = compute_surrogate(WEIGHTED, outputs_of([-1.0, -2.0], [-0.5, -4.0, -0.25]), handle)
    weights = [each.loss_fn_inputs["weights"].tolist() for each in surrogate.data]
    assert weights == [[1.0, 2.0], [1.5, 0.0, 3.0]]
    assert surrogate.loss_sum == 6.5
    assert surrogate.metrics == {"custom/nll:sum": 6.5, "custom/nll:mean": 3.25}
    assert all(len(each.loss_fn_inputs) == 2 for each in surrogate.data)


def test_sparse_targets_without_weights() -> None:
    targets = torch.zeros(4, 8, dtype=torch.int64)
    targets[0, 0], targets[2, 5] = 7, 9
    data = [make_datum(target_tokens=targets)]
    assert data[0].loss_fn_inputs["target_tokens"].is_sparse
    assert forward_data(data)[0].loss_fn_inputs["weights"].shape == [4, 8]
    logprobs = np.linspace(-3, -1, 32, dtype=np.float32).reshape(4, 8)

    def loss_fn(data, logprobs):
        mask = data[0].loss_fn_inputs["target_tokens"].to_torch() > 0
        assert logprobs[0].shape == mask.shape
        return (logprobs[0][mask] ** 2).sum(), {}

    surrogate = compute_surrogate(data, outputs_of(logprobs), loss_fn)
    [datum] = surrogate.data
    expected = np.where(targets.numpy() > 0, -2 * logprobs, 0)
    np.testing.assert_allclose(datum.loss_fn_inputs["weights"].to_numpy(), expected)
    assert not datum.loss_fn_inputs["weights"].is_sparse
    assert datum.loss_fn_inputs["target_tokens"] is data[0].loss_fn_inputs["target_tokens"]


def test_provenance_is_preserved() -> None:
    spans = [SampledProvenanceSpan(sequence_id="s", length=3)]
    data = [DATA[0].with_provenance(spans, spans)]
    [datum] = compute_surrogate(data, OUTPUTS[:1], lambda data, lp: (lp[0].sum(), {})).data
    assert (datum.model_input_spans, datum.loss_fn_input_spans) == (spans, spans)


def test_loss_receives_float32_leaf_copies() -> None:
    seen: list[torch.Tensor] = []

    def loss_fn(data, logprobs):
        assert data is DATA
        seen.extend(logprobs)
        logprobs.clear()
        return sum(each.sum() for each in seen), {}

    with torch.no_grad():
        surrogate = compute_surrogate(DATA, OUTPUTS, loss_fn)
    assert [(each.dtype, each.is_leaf, each.requires_grad) for each in seen] == [
        (torch.float32, True, True)
    ] * 2
    seen[0].detach().fill_(0)
    assert OUTPUTS[0]["logprobs"].tolist() == [-1.0, -2.0, -0.5]
    assert surrogate.data[1].loss_fn_inputs["weights"].tolist() == [-1.0, -1.0]


def test_gradients_reach_user_parameters() -> None:
    scale = torch.ones((), requires_grad=True)
    compute_surrogate(DATA, OUTPUTS, lambda data, lp: ((lp[0].sum() + lp[1].sum()) * scale, {}))
    assert scale.grad is not None
    assert scale.grad.item() == -6.75


def test_backward_inside_loss_is_not_counted_twice() -> None:
    def loss_fn(data, logprobs):
        loss = logprobs[0].sum() + logprobs[1].sum()
        loss.backward(retain_graph=True)
        return loss, {}

    surrogate = compute_surrogate(DATA, OUTPUTS, loss_fn)
    assert surrogate.data[0].loss_fn_inputs["weights"].tolist() == [-1.0, -1.0, -1.0]


def test_ignored_datum_gets_zero_weights_and_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tinkex"):
        surrogate = compute_surrogate(DATA, OUTPUTS, lambda data, lp: (lp[0].sum(), {}))
    assert surrogate.data[1].loss_fn_inputs["weights"].tolist() == [0.0, 0.0]
    assert [record.getMessage() for record in caplog.records] == [
        "The custom loss does not depend on the log-probabilities of 1 of 2 datums; "
        "their gradient is zero"
    ]


@pytest.mark.parametrize(
    "loss",
    [torch.tensor(1.0), torch.ones((), requires_grad=True) * 2],
    ids=["constant", "other parameters"],
)
def test_loss_independent_of_logprobs_is_rejected(loss: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match="does not depend on the log-probabilities"):
        compute_surrogate(DATA, OUTPUTS, lambda data, logprobs: (loss, {}))


def total(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return logprobs[0].sum() + logprobs[1].sum()


@pytest.mark.parametrize(
    ("loss_fn", "sentence"),
    [
        (lambda data, lp: total(lp), r"returned tensor.*expected \(loss, metrics\)"),
        (lambda data, lp: None, r"returned None; expected \(loss, metrics\)"),
        (lambda data, lp: (total(lp), {}, 1), r"expected \(loss, metrics\)"),
        (lambda data, lp: (3.5, {}), "returned 3.5 as its loss"),
        (lambda data, lp: (lp[0], {}), r"returned tensor\(\[-1.* as its loss"),
        (lambda data, lp: (total(lp) * 1j, {}), "as its loss; expected a real scalar"),
        (lambda data, lp: (total(lp), None), "returned None as its metrics"),
        (lambda data, lp: (total(lp), {"a": "0.5"}), "metric 'a' of the custom loss is '0.5'"),
        (lambda data, lp: (total(lp), {"a": [1.0]}), r"metric 'a' of the custom loss is \[1.0\]"),
        (lambda data, lp: (total(lp), {"a": lp[0]}), "metric 'a' of the custom loss is tensor"),
        (lambda data, lp: (total(lp), {"a": None}), "metric 'a' of the custom loss is None"),
        (lambda data, lp: (total(lp), {1: 1.0}), "a metric of the custom loss is named 1"),
        (lambda data, lp: (total(lp) * math.nan, {}), "custom loss is nan"),
        (lambda data, lp: (total(lp) * -math.inf, {}), "custom loss is inf"),
        (
            lambda data, lp: (total(lp) + (lp[1] + 3.0).abs().sqrt().sum(), {}),
            r"the gradient of the custom loss is (nan|inf) at logprobs\[0\] of data\[1\]",
        ),
    ],
)
def test_invalid_loss_result_is_rejected(loss_fn: Loss, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        compute_surrogate(DATA, OUTPUTS, loss_fn)


def test_one_element_tensor_counts_as_scalar() -> None:
    surrogate = compute_surrogate(DATA, OUTPUTS, lambda data, lp: (total(lp)[None], {}))
    assert surrogate.loss_sum == -6.75


def test_exception_of_loss_is_passed_on() -> None:
    mine = KeyError("mine")

    def raises(data, logprobs):
        raise mine

    with pytest.raises(KeyError) as raised:
        compute_surrogate(DATA, OUTPUTS, raises)
    assert raised.value is mine


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (OUTPUTS[:1], "returned 1 outputs for 2 datums"),
        ([OUTPUTS[0], {}], r"returned logprobs None for data\[1\]"),
        ([OUTPUTS[0], OUTPUTS[0]], r"shape=\[3\]\) for data\[1\], whose .* shape \[2\]"),
    ],
)
def test_mismatched_forward_output_is_response_error(outputs: Any, sentence: str) -> None:
    with pytest.raises(APIResponseValidationError, match=sentence):
        compute_surrogate(DATA, outputs, square_and_exp)
