"""Parses and validates the training examples of a request.

Shape letters: T tokens, P pairs of (token position, target).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tinkex.engine.custom_losses.graphs import (
    MAX_EXAMPLE_ELEMENTS,
    MAX_REQUEST_ELEMENTS,
    UploadedLoss,
)
from tinkex.engine.losses import (
    LOSSES,
    SAMPLED_INPUT,
    Floats,
    LossFunction,
    compute_loss,
    find_custom_loss,
    get_loss,
    parse_loss_config,
)
from tinkex.errors import InvalidInput
from tinkex.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    LossFnOutput,
    ModelInput,
    SampledProvenanceSpan,
    TensorData,
)

Tokens: TypeAlias = npt.NDArray[np.int64]

#: Limits memory: a sparse tensor of a few bytes may expand to any number of elements.
MAX_TARGETS = 1 << 24
#: A loss is computed for this many shapes of inputs when a request arrives.
_MAX_CHECKED_SHAPES = 16
_TARGETS = "target_tokens"
_KNOWN_INPUTS = dict.fromkeys(
    [
        _TARGETS,
        *(
            name
            for loss in LOSSES.values()
            for name in (*loss.required_inputs, *loss.optional_inputs)
        ),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExample:
    """A validated example: the hidden state of token position r predicts the targets of r."""

    tokens: Tokens
    """(T,) input tokens."""
    targets: Tokens
    """(P,) tokens to predict, ordered by position."""
    rows: Tokens
    """(P,) the token position of each target."""
    shape: tuple[int, ...]
    """The original shape of the targets: (T,), or (T, K) for K targets per position."""
    inputs: Mapping[str, Floats]
    """(P,) each, or any shape for an uploaded loss; exactly the inputs that the loss reads."""

    def to_output(self, logprobs_P: npt.NDArray[np.floating]) -> LossFnOutput:
        """The output of this example: log-probabilities in the shape of its targets."""
        shaped = logprobs_P.astype(np.float32, copy=False).reshape(self.shape)
        return {"logprobs": TensorData.from_numpy(shaped)}


def parse_examples(
    request: ForwardBackwardInput, *, vocab_size: int, max_context_tokens: int
) -> list[TrainingExample]:
    """Parse the examples of a request; raises InvalidInput for the first problem."""
    custom = find_custom_loss(request)
    if not request.data:
        raise InvalidInput("data is empty; send at least one example")
    for index, datum in enumerate(request.data):
        _check_shapes(index, datum, max_context_tokens)
    _check_num_targets(request.data)
    if custom is not None:
        return _parse_custom_examples(request.data, custom, vocab_size)
    loss, settings = get_loss(request.loss_fn), parse_loss_config(request)
    for index, datum in enumerate(request.data):
        _check_known_inputs(index, datum)
    if loss.uses_provenance:
        _check_recorded_logprobs(request.data)
    defaults = _loss_input_defaults(request.data, loss, settings)
    examples = [
        _parse_example(index, datum, defaults, vocab_size)
        for index, datum in enumerate(request.data)
    ]
    if not loss.uses_provenance:
        return examples
    sampled = [
        _find_sampled(index, request.data[index], each) for index, each in enumerate(examples)
    ]
    return [
        replace(example, inputs={**example.inputs, SAMPLED_INPUT: is_sampled})
        for example, is_sampled in zip(examples, sampled, strict=True)
    ]


def _check_shapes(index: int, datum: Datum, max_context_tokens: int) -> None:
    """Raise InvalidInput if shapes do not match, before any tensor is expanded."""
    num_tokens = count_text_tokens(
        f"the input of example {index}", datum.model_input, max_context_tokens
    )
    targets = datum.loss_fn_inputs.get(_TARGETS)
    if num_tokens == 0:
        raise InvalidInput(f"example {index} has no input tokens")
    if targets is None:
        raise InvalidInput(f"example {index} has no loss_fn_inputs[{_TARGETS!r}]")
    if targets.dtype != "int64":
        raise InvalidInput(f"{_TARGETS} of example {index} are {targets.dtype}, expected int64")
    shape = targets.shape
    if len(shape) not in {1, 2} or shape[0] != num_tokens or not shape[-1]:
        raise InvalidInput(
            f"example {index} has {num_tokens} input tokens, but its {_TARGETS} have shape "
            f"{shape}; expected [{num_tokens}], or [{num_tokens}, K] for K targets per token"
        )


def _check_known_inputs(index: int, datum: Datum) -> None:
    if not datum.loss_fn_inputs.keys() <= _KNOWN_INPUTS.keys():
        unknown = next(name for name in datum.loss_fn_inputs if name not in _KNOWN_INPUTS)
        raise InvalidInput(
            f"example {index} has loss_fn_inputs[{unknown!r}], which no loss reads; known are "
            f"{', '.join(_KNOWN_INPUTS)}"
        )


def _check_num_targets(data: Iterable[Datum]) -> None:
    num_pairs = sum(math.prod(datum.loss_fn_inputs[_TARGETS].shape) for datum in data)
    if num_pairs > MAX_TARGETS:
        raise InvalidInput(
            f"the request has {num_pairs} targets; send at most {MAX_TARGETS} at a time"
        )


def _check_recorded_logprobs(data: Iterable[Datum]) -> None:
    for index, datum in enumerate(data):
        if "logprobs" not in datum.loss_fn_inputs:
            shape = datum.loss_fn_inputs[_TARGETS].shape
            raise InvalidInput(
                f"example {index} needs logprobs of shape {shape}, got nothing; this server does "
                "not record them while it samples, so send those of the sampled tokens"
            )


def _loss_input_defaults(
    data: Iterable[Datum], loss: LossFunction, settings: Mapping[str, float]
) -> dict[str, float | None]:
    """The inputs that the loss reads: all required ones, and optional ones that any example has.

    The values are the defaults for examples without the input: the request's setting of that name,
    or 1. None means that every example must have the input.
    """
    given = {name for datum in data for name in datum.loss_fn_inputs}
    optional = {name: settings.get(name, 1.0) for name in loss.optional_inputs if name in given}
    return {**dict.fromkeys(loss.required_inputs), **optional}


def _parse_example(
    index: int, datum: Datum, defaults: Mapping[str, float | None], vocab_size: int
) -> TrainingExample:
    tensor = datum.loss_fn_inputs[_TARGETS]
    inputs = {
        name: _parse_loss_input(index, datum, name, value) for name, value in defaults.items()
    }
    tokens = check_tokens(f"the input of example {index}", datum.model_input.to_ints(), vocab_size)
    targets = check_tokens(f"{_TARGETS} of example {index}", tensor.to_numpy(), vocab_size)
    rows = np.arange(len(tokens))
    return TrainingExample(
        tokens=tokens,
        targets=targets.ravel(),
        rows=rows if targets.ndim == 1 else np.repeat(rows, targets.shape[1]),
        shape=tuple(tensor.shape),
        inputs=inputs,
    )


def _parse_custom_examples(
    data: Sequence[Datum], loss: UploadedLoss, vocab_size: int
) -> list[TrainingExample]:
    """The examples of an uploaded loss, whose inputs keep their shapes; checks their number."""
    total = 0
    for index, datum in enumerate(data):
        num_elements = loss.count_elements(_custom_input_sizes(index, datum, loss))
        total += num_elements
        if num_elements > MAX_EXAMPLE_ELEMENTS or total > MAX_REQUEST_ELEMENTS:
            raise InvalidInput(
                f"the custom loss computes too many values for the request, at example {index}; "
                "send fewer or shorter examples, or a loss with fewer operations"
            )
    examples = [_parse_example(index, datum, {}, vocab_size) for index, datum in enumerate(data)]
    return [
        replace(
            example,
            inputs={
                name: datum.loss_fn_inputs[name].to_numpy().astype(np.float64)
                for name in loss.input_names
            },
        )
        for example, datum in zip(examples, data, strict=True)
    ]


def check_custom_shapes(request: ForwardBackwardInput, examples: Sequence[TrainingExample]) -> None:
    """Compute an uploaded loss for examples of different shapes; raises InvalidInput if it fails.

    The log-probabilities are not known yet, so zeros stand for them.
    """
    by_shape: dict[object, TrainingExample] = {}
    for example in examples:
        shapes = [value.shape for value in example.inputs.values()]
        by_shape.setdefault((example.shape, *shapes), example)
    for example in list(by_shape.values())[:_MAX_CHECKED_SHAPES]:
        loss = compute_loss(request, [example], [np.zeros(math.prod(example.shape))])
        if loss.error:
            raise InvalidInput(loss.error)


def _custom_input_sizes(index: int, datum: Datum, loss: UploadedLoss) -> list[int]:
    """The number of elements of each input, before any is expanded."""
    sizes = []
    for expected in loss.inputs:
        # Log-probabilities have the shape of the targets.
        name = _TARGETS if expected.name == "logprobs" else expected.name
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is None or len(tensor.shape) != expected.rank:
            actual = "nothing" if tensor is None else f"shape {tensor.shape}"
            raise InvalidInput(
                f"example {index} needs {name} with {expected.rank} dimensions for the custom "
                f"loss, got {actual}"
            )
        sizes.append(math.prod(tensor.shape))
    return sizes


def _parse_loss_input(index: int, datum: Datum, name: str, default: float | None) -> Floats:
    tensor = datum.loss_fn_inputs.get(name)
    shape = datum.loss_fn_inputs[_TARGETS].shape
    if tensor is None and default is not None:
        return np.full(math.prod(shape), default)
    if tensor is None or tensor.shape != shape:
        actual = "nothing" if tensor is None else f"shape {tensor.shape}"
        raise InvalidInput(
            f"example {index} needs {name} of shape {shape}, like its {_TARGETS}, got {actual}"
        )
    flat_P: Floats = tensor.to_numpy().ravel().astype(np.float64)
    return flat_P


def _find_sampled(index: int, datum: Datum, example: TrainingExample) -> Floats:
    """(P,) 1 for targets in a span of sampled tokens; without spans, for those with an advantage.

    Targets without an advantage are usually prompt tokens, whose log-probability is a placeholder.
    """
    spans = datum.loss_fn_input_spans
    if spans is None:
        has_advantage: Floats = (example.inputs["advantages"] != 0.0).astype(np.float64)
        return has_advantage
    lengths = [span.length for span in spans]
    if sum(lengths) != len(example.tokens):
        raise InvalidInput(
            f"the loss_fn_inputs spans of example {index} cover {sum(lengths)} positions, but it "
            f"has {len(example.tokens)} {_TARGETS}"
        )
    kinds = np.array([isinstance(span, SampledProvenanceSpan) for span in spans], dtype=np.float64)
    is_sampled: Floats = np.repeat(kinds, lengths)[example.rows]
    return is_sampled


def count_text_tokens(label: str, model_input: ModelInput, max_context_tokens: int) -> int:
    """Count the tokens; raises InvalidInput for non-text chunks or too many tokens."""
    num_tokens = 0
    for chunk in model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise InvalidInput(
                f"{label} has a chunk of type {chunk.type!r}, but this model reads text only"
            )
        num_tokens += len(chunk.tokens)
    if num_tokens > max_context_tokens:
        raise InvalidInput(
            f"{label} has {num_tokens} tokens; this model reads at most {max_context_tokens}"
        )
    return num_tokens


def check_tokens(label: str, tokens: npt.ArrayLike, vocab_size: int) -> Tokens:
    """Convert tokens to an array; raises InvalidInput for the first one outside the vocabulary."""
    array: Tokens = np.asarray(tokens, dtype=np.int64)
    # As unsigned, negative values are huge, so one maximum checks both bounds.
    if array.view(np.uint64).max(initial=0) >= vocab_size:
        is_outside = (array < 0) | (array >= vocab_size)
        index = np.unravel_index(int(is_outside.argmax()), array.shape)
        position = ", ".join(str(int(coordinate)) for coordinate in index)
        raise InvalidInput(
            f"{label} has token {array[index]}, outside the vocabulary of {vocab_size}, at "
            f"position {position}"
        )
    return array
