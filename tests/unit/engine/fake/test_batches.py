"""Examples into arrays and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinkex.engine.fake.batches import gather, read_tokens, run_batch
from tinkex.engine.fake.bigram import Bigram, Trainer
from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ImageChunk,
    ModelInput,
    TensorData,
)


def datum(tokens: list[int], targets: object, **inputs: object) -> Datum:
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, **inputs})  # type: ignore[dict-item]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(Bigram.base("tinkex/bigram"))


def test_what_is_not_text_is_placeholders() -> None:
    picture = ImageChunk(data=b"png", format="png", expected_tokens=3)
    mixed = ModelInput(chunks=[EncodedTextChunk(tokens=[7]), picture, EncodedTextChunk(tokens=[8])])
    assert read_tokens(mixed) == [7, 511, 511, 511, 8]


def test_examples_are_laid_one_after_the_other() -> None:
    data = [
        datum([1, 2], [2, 3], weights=[1.0, 0.5]),
        datum([4], [[5, 6]], weights=[[0.25, 0.75]]),
    ]
    batch = gather(data, 512)
    assert batch.previous_P.tolist() == [1, 2, 4, 4]
    assert batch.next_P.tolist() == [2, 3, 5, 6]
    assert batch.inputs["weights"].tolist() == [1.0, 0.5, 0.25, 0.75]
    assert batch.starts.tolist() == [0, 2]


def test_a_sparse_target_is_filled_with_zeros() -> None:
    sparse = TensorData([9], "int64", [2, 3], [0, 1, 1], [2])
    weights = TensorData([1.0], "float32", [2, 3], [0, 1, 1], [2])
    batch = gather([datum([1, 2], sparse, weights=weights)], 512)
    assert batch.next_P.tolist() == [0, 0, 9, 0, 0, 0]
    assert batch.inputs["weights"].tolist() == [0, 0, 1, 0, 0, 0]


def test_outputs_have_the_shapes_of_their_targets(trainer: Trainer) -> None:
    work = ForwardBackwardInput([datum([1, 2], [2, 3]), datum([4], [[5, 6]])], "cross_entropy")
    output = run_batch(trainer, work, forward_only=True)
    shapes = [record["logprobs"].shape for record in output.loss_fn_outputs]
    assert shapes == [[2], [1, 2]]
    scores = trainer.model.logprobs_VV
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(
        [scores[1, 2], scores[2, 3]]
    )
    expected = -(scores[1, 2] + scores[2, 3] + scores[4, 5] + scores[4, 6])
    probs = np.exp(scores)
    entropy = -(probs * scores).sum(axis=1)[[1, 2, 4, 4]].mean()
    assert output.metrics == {
        "loss:sum": pytest.approx(expected),
        "tokens:sum": 4.0,
        "entropy:mean": pytest.approx(entropy),
    }
    assert trainer.gradient_VV is None


def test_only_a_backward_pass_leaves_a_gradient(trainer: Trainer) -> None:
    work = ForwardBackwardInput([datum([1], [2])], "cross_entropy")
    run_batch(trainer, work, forward_only=False)
    assert trainer.gradient_VV is not None
    probs = trainer.model.probs_VV[1].copy()
    probs[2] -= 1.0
    np.testing.assert_allclose(trainer.gradient_VV[1], probs)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "no data"),
        (
            [Datum(ModelInput.from_ints([1]))],
            "example 0 has no loss_fn_inputs",
        ),
        ([datum([1, 2], [3])], "example 0 has 2 input tokens.*shape \\[1\\]"),
        ([datum([1], [512])], "target_tokens of example 0 has token 512"),
        ([datum([600], [1])], "the input of example 0 has token 600"),
        (
            [datum([1], TensorData([2.5], "float32"))],
            "target_tokens of example 0 are float32, expected int64",
        ),
        (
            [datum([1], [2], weights=[1.0, 2.0])],
            r"example 0 needs weights of shape \[1\], like its target_tokens, got shape \[2\]",
        ),
        (
            [datum([1, 2], [[2, 3], [4, 5]], weights=[1.0, 2.0, 3.0, 4.0])],
            r"example 0 needs weights of shape \[2, 2\].*got shape \[4\]",
        ),
        (
            [datum([1], [2], weights=[1.0]), datum([1], [2])],
            r"example 1 needs weights of shape \[1\].*got nothing",
        ),
        (
            [datum([1], [2]), datum([1], [2], weights=[1.0])],
            r"example 0 needs weights of shape \[1\].*got nothing",
        ),
    ],
)
def test_examples_that_do_not_fit_are_named(data: list[Datum], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gather(data, 512)


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        ("mse", "'mse' is not one of cross_entropy, importance_sampling, ppo"),
        ("custom", "'custom' is not computed by this model; use forward_backward_custom"),
        ("stable_reinforce", "'stable_reinforce' is not computed.*use importance_sampling or ppo"),
    ],
)
def test_a_loss_that_is_not_computed_is_refused(
    trainer: Trainer, loss_fn: Any, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        run_batch(trainer, ForwardBackwardInput([datum([1], [2])], loss_fn), forward_only=True)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "gspo"])
def test_an_infinite_loss_leaves_no_gradient(trainer: Trainer, loss_fn: Any) -> None:
    far = datum([1], [2], logprobs=[-1e4], advantages=[-1.0])
    work = ForwardBackwardInput([far], loss_fn)
    with pytest.raises(InvalidInput, match=f"the {loss_fn} loss is inf; check its inputs"):
        run_batch(trainer, work, forward_only=False)
    assert trainer.gradient_VV is None


def test_a_gradient_that_is_too_large_is_refused_and_the_one_before_kept(
    trainer: Trainer,
) -> None:
    run_batch(trainer, ForwardBackwardInput([datum([1], [2])], "cross_entropy"), forward_only=False)
    before = trainer.gradient_VV
    far = datum([1], [2], logprobs=[-600.0], advantages=[-1.0])
    with pytest.raises(InvalidInput, match="the gradient is not finite"):
        run_batch(trainer, ForwardBackwardInput([far], "importance_sampling"), forward_only=False)
    assert trainer.gradient_VV is before
