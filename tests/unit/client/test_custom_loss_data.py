"""Custom losses without torch: data of both passes, checks, metrics, light import."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tinkex.client.custom_loss import (
    LossHandle,
    SurrogateLoss,
    check_loss_fn,
    check_loss_inputs,
    forward_data,
    with_custom_metrics,
)
from tinkex.errors import InvalidInput
from tinkex.types import (
    CustomLossInput,
    CustomLossInputRank,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledProvenanceSpan,
    TensorData,
)


def datum(**loss_fn_inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints([1, 2, 3]), loss_fn_inputs)


def handle(code: str = "code", **ranks: CustomLossInputRank) -> LossHandle:
    inputs = tuple(CustomLossInput(name=name, rank=rank) for name, rank in ranks.items())
    return LossHandle("my_loss", inputs, "session", cast(Any, SimpleNamespace(code=code)))


def test_forward_data_has_targets_and_given_weights_only() -> None:
    [forward] = forward_data(
        [datum(target_tokens=[2, 3, 4], weights=[0.5, 1.0, 0.0], advantages=[1.0, 1.0, 1.0])]
    )
    assert sorted(forward.loss_fn_inputs) == ["target_tokens", "weights"]
    assert forward.loss_fn_inputs["weights"].tolist() == [0.5, 1.0, 0.0]


def test_forward_data_fills_missing_weights_with_zeros() -> None:
    [forward] = forward_data([datum(target_tokens=[2, 3, 4])])
    assert forward.loss_fn_inputs["weights"] == TensorData([0.0] * 3, "float32", [3])


def test_forward_data_fills_zeros_for_sparse_targets() -> None:
    targets = np.zeros((4, 8), dtype=np.int64)
    targets[0, 0], targets[2, 5] = 7, 9
    given = datum(target_tokens=targets)
    assert given.loss_fn_inputs["target_tokens"].is_sparse
    [forward] = forward_data([given])
    assert forward.loss_fn_inputs["target_tokens"] == given.loss_fn_inputs["target_tokens"]
    assert forward.loss_fn_inputs["weights"].to_numpy().shape == (4, 8)
    assert not forward.loss_fn_inputs["weights"].to_numpy().any()


def test_forward_data_preserves_provenance() -> None:
    spans = [SampledProvenanceSpan(sequence_id="s", length=3)]
    given = datum(target_tokens=[2, 3, 4]).with_provenance(spans, spans)
    [forward] = forward_data([given])
    assert (forward.model_input_spans, forward.loss_fn_input_spans) == (spans, spans)
    assert forward.model_input is given.model_input


def test_forward_data_error_names_datum_without_targets() -> None:
    data = [datum(target_tokens=[1, 2, 3]), datum(weights=[1.0])]
    with pytest.raises(InvalidInput, match=r"data\[1\] has no 'target_tokens'"):
        forward_data(data)


def test_forward_data_rejects_non_datum() -> None:
    with pytest.raises(InvalidInput, match=r"data\[0\] must be a Datum, got dict"):
        forward_data(cast(Any, [{"target_tokens": [1]}]))


def test_inputs_with_declared_ranks_are_accepted() -> None:
    loss = handle(logprobs=1, advantages=1, scale=0)
    scale = TensorData([2.0], "float32", [])
    check_loss_inputs(loss, [datum(target_tokens=[1, 2], advantages=[1.0, 2.0], scale=scale)])


def test_missing_input_is_named() -> None:
    loss = handle(logprobs=1, advantages=1)
    with pytest.raises(InvalidInput, match=r"data\[0\] has no 'advantages'"):
        check_loss_inputs(loss, [datum(target_tokens=[1, 2])])


def test_missing_targets_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"data\[0\] has no 'target_tokens'"):
        check_loss_inputs(handle(logprobs=1), [datum(weights=[1.0])])


def test_wrong_rank_error_shows_shape() -> None:
    loss = handle(logprobs=1, advantages=2)
    data = [datum(target_tokens=[1, 2], advantages=[1.0, 2.0])]
    expected = r"data\[0\] has 'advantages' of shape \[2\]; .* takes advantages with rank 2"
    with pytest.raises(InvalidInput, match=expected):
        check_loss_inputs(loss, data)


def test_logprobs_rank_is_target_rank() -> None:
    with pytest.raises(InvalidInput, match=r"'target_tokens' of shape \[2\].*logprobs with rank 2"):
        check_loss_inputs(handle(logprobs=2), [datum(target_tokens=[1, 2])])


def test_handle_input_names_exclude_logprobs() -> None:
    assert handle(logprobs=1, b=1, a=2).input_names == ("b", "a")


def test_handle_key_depends_on_computation() -> None:
    one = handle("x", logprobs=1)
    assert one.key == LossHandle("other", one.inputs, "elsewhere", one.graph, "id").key
    assert one.key != handle("y", logprobs=1).key
    assert one.key != handle("x", logprobs=2).key


def test_handle_equality_and_repr_ignore_graph() -> None:
    assert handle("x", logprobs=1) == handle("y", logprobs=1)
    assert "SimpleNamespace" not in repr(handle(logprobs=1))


def test_custom_metrics_override_server_metrics() -> None:
    output = ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 5.0, "tokens:sum": 3.0})
    changed = with_custom_metrics(output, SurrogateLoss([], 1.5, {"mine": 2.0, "tokens:sum": 4.0}))
    assert changed.metrics == {
        "tokens:sum": 4.0,
        "mine": 2.0,
        "loss:sum": 1.5,
        "surrogate_loss:sum": 5.0,
    }
    assert output.metrics == {"loss:sum": 5.0, "tokens:sum": 3.0}


def test_missing_server_loss_metric_is_allowed() -> None:
    output = ForwardBackwardOutput("ArrayRecord", [], {})
    assert with_custom_metrics(output, SurrogateLoss([], 1.5, {})).metrics == {"loss:sum": 1.5}


def test_loss_must_be_callable() -> None:
    with pytest.raises(InvalidInput, match="got 'cross_entropy'"):
        check_loss_fn("cross_entropy")
