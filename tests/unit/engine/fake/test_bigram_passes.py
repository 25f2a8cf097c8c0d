"""Passes of the bigram model: outputs, metrics and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinkex.engine.fake.bigram import Bigram, BigramTrainer, flatten_tokens, run_pass
from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ImageChunk,
    ModelInput,
)


def datum(tokens: list[int], targets: object, **inputs: object) -> Datum:
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, **inputs})  # type: ignore[dict-item]


@pytest.fixture
def trainer() -> BigramTrainer:
    return BigramTrainer(Bigram.base("tinkex/bigram"))


def test_non_text_chunks_become_placeholders() -> None:
    picture = ImageChunk(data=b"png", format="png", expected_tokens=3)
    mixed = ModelInput(chunks=[EncodedTextChunk(tokens=[7]), picture, EncodedTextChunk(tokens=[8])])
    assert flatten_tokens(mixed) == [7, 511, 511, 511, 8]


def test_outputs_have_target_shapes(trainer: BigramTrainer) -> None:
    work = ForwardBackwardInput([datum([1, 2], [2, 3]), datum([4], [[5, 6]])], "cross_entropy")
    output = run_pass(trainer, work, forward_only=True)
    shapes = [record["logprobs"].shape for record in output.loss_fn_outputs]
    assert shapes == [[2], [1, 2]]
    scores = trainer.model.logprobs_VV
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(
        [scores[1, 2], scores[2, 3]]
    )
    expected = -(scores[1, 2] + scores[2, 3] + scores[4, 5] + scores[4, 6])
    probs = np.exp(scores)
    entropy = -(probs * scores).sum(axis=1)[[1, 2, 4]].mean()
    assert output.metrics == {
        "loss:sum": pytest.approx(expected),
        "tokens:sum": 3.0,
        "entropy:mean": pytest.approx(entropy),
    }
    assert trainer.gradient_VV is None


def test_forward_only_pass_leaves_no_gradient(trainer: BigramTrainer) -> None:
    work = ForwardBackwardInput([datum([1], [2])], "cross_entropy")
    run_pass(trainer, work, forward_only=False)
    assert trainer.gradient_VV is not None
    probs = trainer.model.probs_VV[1].copy()
    probs[2] -= 1.0
    np.testing.assert_allclose(trainer.gradient_VV[1], probs)


def test_invalid_examples_are_rejected(trainer: BigramTrainer) -> None:
    with pytest.raises(InvalidInput, match="example 0 has token 512, outside the vocabulary"):
        run_pass(
            trainer, ForwardBackwardInput([datum([1], [512])], "cross_entropy"), forward_only=False
        )
    assert trainer.gradient_VV is None


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "gspo"])
def test_infinite_loss_leaves_no_gradient(trainer: BigramTrainer, loss_fn: Any) -> None:
    far = datum([1], [2], logprobs=[-1e4], advantages=[-1.0])
    work = ForwardBackwardInput([far], loss_fn)
    with pytest.raises(InvalidInput, match=f"the {loss_fn} loss is inf; check its inputs"):
        run_pass(trainer, work, forward_only=False)
    assert trainer.gradient_VV is None


def test_overflowing_gradient_is_rejected_and_previous_kept(trainer: BigramTrainer) -> None:
    run_pass(trainer, ForwardBackwardInput([datum([1], [2])], "cross_entropy"), forward_only=False)
    before = trainer.gradient_VV
    far = datum([1], [2], logprobs=[-600.0], advantages=[-1.0])
    with pytest.raises(InvalidInput, match="the gradient is not finite"):
        run_pass(trainer, ForwardBackwardInput([far], "importance_sampling"), forward_only=False)
    assert trainer.gradient_VV is before
