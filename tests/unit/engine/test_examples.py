"""Parsing and validation of training examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine import examples
from tinkex.engine.examples import TrainingExample, check_tokens, count_text_tokens, parse_examples
from tinkex.engine.losses import LOSSES
from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)

PICTURE = ImageChunk(data=b"png", format="png", expected_tokens=3)


def datum(tokens: list[int], targets: Any, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, **inputs})


def parse(
    data: list[Datum], loss_fn: Any = "cross_entropy", config: Any = None
) -> list[TrainingExample]:
    work = ForwardBackwardInput(data, loss_fn, config)
    return parse_examples(work, vocab_size=512, max_context_tokens=8)


def sampled(tokens: list[int], **inputs: Any) -> Datum:
    zeros = [0.0] * len(tokens)
    return datum(tokens, tokens, **{"logprobs": zeros, "advantages": zeros, **inputs})


def test_parse_one_target_per_token() -> None:
    [example] = parse([datum([1, 2, 3], [2, 3, 4], weights=[1.0, 0.5, 0.0])])
    assert example.tokens.tolist() == [1, 2, 3]
    assert example.targets.tolist() == [2, 3, 4]
    assert example.rows.tolist() == [0, 1, 2]
    assert example.shape == (3,)
    assert example.inputs["weights"].tolist() == [1.0, 0.5, 0.0]
    assert example.inputs["weights"].dtype == np.float64
    assert {example.tokens.dtype, example.targets.dtype, example.rows.dtype} == {np.dtype(np.int64)}


def test_parse_several_targets_per_token() -> None:
    [example] = parse([datum([1, 2], [[5, 6, 7], [8, 9, 0]], weights=[[1, 2, 3], [4, 5, 6]])])
    assert example.targets.tolist() == [5, 6, 7, 8, 9, 0]
    assert example.rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert example.shape == (2, 3)
    assert example.inputs["weights"].tolist() == [1, 2, 3, 4, 5, 6]


def test_sparse_tensor_is_expanded_with_zeros() -> None:
    sparse = TensorData([9], "int64", [2, 3], [0, 1, 1], [2])
    weights = TensorData([1.0], "float32", [2, 3], [0, 1, 1], [2])
    [example] = parse([datum([1, 2], sparse, weights=weights)])
    assert example.targets.tolist() == [0, 0, 9, 0, 0, 0]
    assert example.inputs["weights"].tolist() == [0, 0, 1, 0, 0, 0]


def test_text_chunks_are_concatenated() -> None:
    text = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), EncodedTextChunk(tokens=[3])])
    [example] = parse([Datum(text, {"target_tokens": [2, 3, 4]})])
    assert example.tokens.tolist() == [1, 2, 3]


def test_only_loss_inputs_are_parsed() -> None:
    given_more = sampled([1], weights=[1.0], sequence_ratio_mask=[1.0])
    assert parse([given_more], "gspo")[0].inputs.keys() == {
        "logprobs",
        "advantages",
        "sequence_ratio_mask",
    }
    assert parse([given_more])[0].inputs.keys() == {"weights"}
    assert parse([given_more], "ppo")[0].inputs.keys() == {"logprobs", "advantages"}


def test_optional_input_default_for_examples_without_it() -> None:
    with_weights, without = datum([1], [2], weights=[0.5]), datum([1, 2], [[2, 3], [4, 5]])
    for data in ([with_weights, without], [without, with_weights]):
        weights = [example.inputs["weights"].tolist() for example in parse(data)]
        assert sorted(weights) == [[0.5], [1.0] * 4]
    masked = sampled([1, 2], sequence_ratio_mask=[0.0, 1.0], clip_low_threshold=[0.1, 0.2])
    first, second = parse([masked, sampled([1])], "gspo")
    assert first.inputs["sequence_ratio_mask"].tolist() == [0.0, 1.0]
    assert second.inputs["sequence_ratio_mask"].tolist() == [1.0]
    assert second.inputs["clip_low_threshold"].tolist() == [0.8]


def test_spans_tell_which_targets_were_sampled() -> None:
    prompt = PromptProvenanceSpan(sequence_id="s", length=1)
    answer = SampledProvenanceSpan(sequence_id="s", length=2)
    given = sampled([1, 2, 3], advantages=[1.0, 0.0, 1.0])
    with_spans, without = parse(
        [given.with_provenance([prompt, answer], [prompt, answer]), given], "stable_reinforce"
    )
    assert with_spans.inputs["is_sampled"].tolist() == [0.0, 1.0, 1.0]
    # Without spans, targets without an advantage may be prompt tokens.
    assert without.inputs["is_sampled"].tolist() == [1.0, 0.0, 1.0]
    assert "is_sampled" not in parse([given], "ppo")[0].inputs


def test_spans_apply_to_all_targets_of_a_position() -> None:
    zeros = [[0.0, 0.0], [0.0, 0.0]]
    soft = datum([1, 2], [[5, 6], [7, 8]], logprobs=zeros, advantages=zeros)
    spans = [
        PromptProvenanceSpan(sequence_id="s", length=1),
        SampledProvenanceSpan(sequence_id="s", length=1),
    ]
    [example] = parse([soft.with_provenance(spans, spans)], "stable_reinforce")
    assert example.inputs["is_sampled"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_spans_of_another_length_are_refused() -> None:
    spans: list[Any] = [SampledProvenanceSpan(sequence_id="s", length=1 << 62)]
    wrong = Datum(ModelInput.from_ints([1]), sampled([1]).loss_fn_inputs, spans, spans)
    with pytest.raises(InvalidInput, match=r"spans of example 0 cover \d+ positions, but it has 1"):
        parse([wrong], "stable_reinforce")


def test_integer_weights_are_accepted() -> None:
    [example] = parse([datum([1, 2], [2, 3], weights=TensorData([1, 0], "int64"))])
    assert example.inputs["weights"].tolist() == [1.0, 0.0]


def test_output_has_target_shape_and_float32() -> None:
    [example] = parse([datum([1, 2], [[5, 6], [7, 8]])])
    logprobs = example.to_output(np.array([-1.0, -2.0, -3.0, -4.0]))["logprobs"]
    assert (logprobs.dtype, logprobs.tolist()) == ("float32", [[-1.0, -2.0], [-3.0, -4.0]])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "data is empty"),
        ([Datum(ModelInput.from_ints([1]))], "example 0 has no loss_fn_inputs"),
        ([datum([], [])], "example 0 has no input tokens"),
        ([datum([1, 2], [3])], r"example 0 has 2 input tokens.*shape \[1\]; expected \[2\], or"),
        ([datum([1], TensorData([], "int64", [1, 0]))], r"have shape \[1, 0\]"),
        ([datum([1], [[[2]]])], r"have shape \[1, 1, 1\]"),
        ([datum([1], [512])], "target_tokens of example 0 has token 512.*512, at position 0"),
        ([datum([1], [-1])], "target_tokens of example 0 has token -1"),
        (
            [datum([1], [2]), datum([1, 2], [[3, 4], [5, 600]])],
            "target_tokens of example 1 has token 600.*at position 1, 1",
        ),
        ([datum([1, 600], [1, 1])], "the input of example 0 has token 600.*at position 1"),
        ([datum([1], TensorData([2.5], "float32"))], "example 0 are float32, expected int64"),
        ([datum([1] * 9, [1] * 9)], "the input of example 0 has 9 tokens; this model reads at mo"),
        (
            [Datum(ModelInput(chunks=[PICTURE]), {"target_tokens": [1, 2, 3]})],
            "example 0 has a chunk of type 'image', but this model reads text only",
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
            [datum([1], [2], weight=[1.0])],
            r"example 0 has loss_fn_inputs\['weight'\], which no loss reads.*weights, logprobs",
        ),
    ],
)
def test_invalid_example_is_named(data: list[Datum], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse(data)


@pytest.mark.parametrize("loss_fn", [name for name, loss in LOSSES.items() if loss.required_inputs])
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_missing_required_input_raises(loss_fn: str, name: str) -> None:
    lacking = sampled([1, 2])
    del lacking.loss_fn_inputs[name]
    with pytest.raises(InvalidInput, match=rf"example 1 needs {name} of shape \[2\].*got nothing"):
        parse([sampled([1]), lacking], loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "config", "reason"),
    [
        ("mse", None, "loss_fn 'mse' is not one of"),
        ("custom", None, "loss_fn 'custom' takes one setting, the loss_id"),
        ("ppo", {"beta": 0.1}, "has 'beta', but ppo takes"),
        ("dro", {"beta": float("inf")}, "must be a finite number"),
    ],
)
def test_loss_and_settings_are_validated(loss_fn: str, config: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse([sampled([1])], loss_fn, config)


def test_sparse_tensor_expansion_is_limited() -> None:
    width = examples.MAX_TARGETS
    huge = TensorData([], "int64", [2, width], [0, 0, 0], [])
    with pytest.raises(InvalidInput, match=f"the request has {2 * width} targets; send at"):
        parse([datum([1, 2], huge)])


@pytest.mark.parametrize("token", [-1, 6])
def test_token_outside_vocabulary_is_named(token: int) -> None:
    with pytest.raises(InvalidInput, match=f"has token {token}, outside the vocabulary of 6, at"):
        check_tokens("the prompt", [0, token, 5], 6)


def test_count_prompt_tokens() -> None:
    assert count_text_tokens("the prompt", ModelInput.from_ints([1, 2, 3]), 3) == 3
    assert count_text_tokens("the prompt", ModelInput.empty(), 3) == 0


shapes = st.one_of(st.tuples(st.integers(1, 8)), st.tuples(st.integers(1, 8), st.integers(1, 4)))


@given(shape=shapes, data=st.data())
def test_pairs_keep_their_positions(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    ids = st.integers(0, 511)
    tokens = data.draw(st.lists(ids, min_size=shape[0], max_size=shape[0]))
    flat = data.draw(st.lists(ids, min_size=size, max_size=size))
    targets = np.array(flat).reshape(shape)
    [example] = parse([datum(tokens, targets, weights=np.arange(size, dtype=float).reshape(shape))])
    assert example.targets.reshape(example.shape).tolist() == targets.tolist()
    grid = np.indices(shape)
    assert example.rows.tolist() == grid[0].ravel().tolist()
    assert example.inputs["weights"].tolist() == list(range(size))


anything = st.one_of(
    st.lists(st.integers(-3, 600), max_size=4),
    st.lists(st.lists(st.integers(-3, 600), min_size=2, max_size=2), max_size=3),
    st.lists(st.floats(-1, 1, width=32), max_size=4),
)


@given(
    tokens=st.lists(st.integers(0, 600), max_size=10),
    inputs=st.dictionaries(st.sampled_from(["target_tokens", "weights", "logprobs"]), anything),
    loss_fn=st.sampled_from([*LOSSES, "mse"]),
)
def test_any_request_is_parsed_or_rejected(
    tokens: list[int], inputs: dict[str, Any], loss_fn: str
) -> None:
    try:
        found = parse([Datum(ModelInput.from_ints(tokens), inputs)], loss_fn)
    except InvalidInput:
        return
    assert found[0].tokens.tolist() == tokens
    assert all(each.shape == found[0].targets.shape for each in found[0].inputs.values())
