"""Training examples turned into flat arrays, scored by a bigram model, and turned back.

Shape letters: V vocabulary, P pairs of (previous token, next token) of all examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinkex.testing.bigram import Bigram, Floats, Tokens, Trainer, check_tokens
from tinkex.testing.losses import LOSSES, Scored
from tinkex.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
    TensorData,
)

#: Stands for every position of an image or a sound.
PLACEHOLDER_TOKEN = 511


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All pairs of all examples, one after the other."""

    previous_P: Tokens
    next_P: Tokens
    inputs: Mapping[str, Floats]
    shapes: Sequence[Sequence[int]]
    starts: Tokens


def read_tokens(model_input: ModelInput) -> list[int]:
    """The token at every position; what is not text counts as placeholders."""
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


def gather(data: Sequence[Datum], vocab_size: int) -> Batch:
    """Flatten the examples, or raise ValueError about the first one that does not fit."""
    if not data:
        raise ValueError("there is no data to train on")
    pairs = [_pairs(index, datum, vocab_size) for index, datum in enumerate(data)]
    sizes = [len(next_P) for _, next_P, _ in pairs]
    names = [name for name in data[0].loss_fn_inputs if name != "target_tokens"]
    return Batch(
        previous_P=np.concatenate([previous_P for previous_P, _, _ in pairs]),
        next_P=np.concatenate([next_P for _, next_P, _ in pairs]),
        inputs={name: _input(name, data, sizes) for name in names},
        shapes=[shape for _, _, shape in pairs],
        starts=np.cumsum([0, *sizes[:-1]]),
    )


def _pairs(index: int, datum: Datum, vocab_size: int) -> tuple[Tokens, Tokens, Sequence[int]]:
    tensor = datum.loss_fn_inputs.get("target_tokens")
    if tensor is None:
        raise ValueError(f"example {index} has no loss_fn_inputs['target_tokens']")
    tokens = read_tokens(datum.model_input)
    if len(tensor.shape) not in {1, 2} or tensor.shape[0] != len(tokens) or not tensor.shape[-1]:
        raise ValueError(
            f"example {index} has {len(tokens)} input tokens, but its target_tokens have shape "
            f"{tensor.shape}"
        )
    previous = check_tokens(f"the input of example {index}", tokens, vocab_size)
    targets = check_tokens(f"target_tokens of example {index}", tensor.to_numpy(), vocab_size)
    width = 1 if targets.ndim == 1 else targets.shape[1]
    return np.repeat(previous, width), targets.ravel(), tensor.shape


def _input(name: str, data: Sequence[Datum], sizes: Sequence[int]) -> Floats:
    parts = []
    for index, (datum, size) in enumerate(zip(data, sizes, strict=True)):
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is None or int(np.prod(tensor.shape)) != size:
            found = "nothing" if tensor is None else f"shape {tensor.shape}"
            raise ValueError(f"example {index} needs {size} numbers as {name}, got {found}")
        parts.append(tensor.to_numpy().ravel())
    flat_P: Floats = np.concatenate(parts).astype(np.float64)
    return flat_P


def run_batch(
    trainer: Trainer, work: ForwardBackwardInput, *, forward_only: bool
) -> ForwardBackwardOutput:
    """Score the examples; unless `forward_only`, add their gradient to the next step's."""
    model = trainer.model
    loss_function = LOSSES.get(work.loss_fn)
    if loss_function is None:
        raise ValueError(f"loss_fn {work.loss_fn!r} is not one of {', '.join(LOSSES)}")
    batch = gather(work.data, model.vocab_size)
    logprobs_P = model.logprobs_VV[batch.previous_P, batch.next_P]
    loss = loss_function(
        Scored(
            logprobs_P=logprobs_P,
            inputs=batch.inputs,
            config=work.loss_fn_config or {},
            starts=batch.starts,
        )
    )
    if not np.isfinite(loss.value):
        raise ValueError(f"the {work.loss_fn} loss is {loss.value}")
    if not forward_only:
        trainer.accumulate(model.gradient(batch.previous_P, batch.next_P, loss.slope_P))
    metrics = {"loss:sum": loss.value, "tokens:sum": float(len(logprobs_P))}
    return ForwardBackwardOutput("ArrayRecord", _outputs(logprobs_P, batch), metrics)


def _outputs(logprobs_P: Floats, batch: Batch) -> list[dict[str, TensorData]]:
    narrow_P = logprobs_P.astype(np.float32)
    parts = np.split(narrow_P, batch.starts[1:])
    return [
        {"logprobs": TensorData.from_numpy(part.reshape(shape))}
        for part, shape in zip(parts, batch.shapes, strict=True)
    ]


def score_pairs(model: Bigram, tokens: Tokens) -> Floats:
    """The log-probability of every token but the first, given the one before it."""
    scores: Floats = model.logprobs_VV[tokens[:-1], tokens[1:]]
    return scores
