"""Examples into arrays and back."""

from __future__ import annotations

import numpy as np
import pytest

from tinkex.testing.batches import gather, read_tokens, run_batch
from tinkex.testing.bigram import Bigram, Trainer
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
    assert output.metrics == {"loss:sum": pytest.approx(expected), "tokens:sum": 4.0}
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
        ([datum([1], [2], weights=[1.0, 2.0])], "example 0 needs 1 numbers as weights"),
        (
            [datum([1], [2], weights=[1.0]), datum([1], [2])],
            "example 1 needs 1 numbers as weights, got nothing",
        ),
    ],
)
def test_examples_that_do_not_fit_are_named(data: list[Datum], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gather(data, 512)


def test_an_unknown_loss_and_an_infinite_one_are_refused(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="'custom' is not one of cross_entropy"):
        run_batch(trainer, ForwardBackwardInput([datum([1], [2])], "custom"), forward_only=True)
    far = datum([1], [2], logprobs=[-1e4], advantages=[1.0])
    work = ForwardBackwardInput([far], "importance_sampling")
    with pytest.raises(ValueError, match="importance_sampling loss is -inf"):
        run_batch(trainer, work, forward_only=True)
