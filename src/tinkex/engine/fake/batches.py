"""Training examples turned into flat arrays, scored by a bigram model, and turned back.

Shape letters: V vocabulary, P pairs of (previous token, next token) of all examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinkex.engine.fake.bigram import Bigram, Floats, Tokens, Trainer, check_tokens
from tinkex.engine.fake.losses import LOSSES, Loss, LossFunction, Scored
from tinkex.errors import InvalidInput
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

#: What to use in place of losses that the protocol names and this model does not compute.
_ADVICE = {
    "custom": "use forward_backward_custom, which computes the loss in the client",
    "stable_reinforce": "use importance_sampling or ppo",
}


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
    """Flatten the examples, or raise InvalidInput about the first one that does not fit."""
    if not data:
        raise InvalidInput("there is no data to train on")
    pairs = [_pairs(index, datum, vocab_size) for index, datum in enumerate(data)]
    sizes = [len(next_P) for _, next_P, _ in pairs]
    shapes = [shape for _, _, shape in pairs]
    names = dict.fromkeys(name for datum in data for name in datum.loss_fn_inputs)
    return Batch(
        previous_P=np.concatenate([previous_P for previous_P, _, _ in pairs]),
        next_P=np.concatenate([next_P for _, next_P, _ in pairs]),
        inputs={name: _input(name, data, shapes) for name in names if name != "target_tokens"},
        shapes=shapes,
        starts=np.cumsum([0, *sizes[:-1]]),
    )


def _pairs(index: int, datum: Datum, vocab_size: int) -> tuple[Tokens, Tokens, Sequence[int]]:
    tensor = datum.loss_fn_inputs.get("target_tokens")
    if tensor is None:
        raise InvalidInput(f"example {index} has no loss_fn_inputs['target_tokens']")
    if tensor.dtype != "int64":
        raise InvalidInput(f"target_tokens of example {index} are {tensor.dtype}, expected int64")
    tokens = read_tokens(datum.model_input)
    if len(tensor.shape) not in {1, 2} or tensor.shape[0] != len(tokens) or not tensor.shape[-1]:
        raise InvalidInput(
            f"example {index} has {len(tokens)} input tokens, but its target_tokens have shape "
            f"{tensor.shape}"
        )
    previous = check_tokens(f"the input of example {index}", tokens, vocab_size)
    targets = check_tokens(f"target_tokens of example {index}", tensor.to_numpy(), vocab_size)
    width = 1 if targets.ndim == 1 else targets.shape[1]
    return np.repeat(previous, width), targets.ravel(), tensor.shape


def _input(name: str, data: Sequence[Datum], shapes: Sequence[Sequence[int]]) -> Floats:
    parts = []
    for index, (datum, shape) in enumerate(zip(data, shapes, strict=True)):
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is None or tensor.shape != shape:
            found = "nothing" if tensor is None else f"shape {tensor.shape}"
            raise InvalidInput(
                f"example {index} needs {name} of shape {shape}, like its target_tokens, "
                f"got {found}"
            )
        parts.append(tensor.to_numpy().ravel())
    flat_P: Floats = np.concatenate(parts).astype(np.float64)
    return flat_P


def run_batch(
    trainer: Trainer, work: ForwardBackwardInput, *, forward_only: bool
) -> ForwardBackwardOutput:
    """Score the examples; unless `forward_only`, add their gradient to the next step's.

    What cannot be scored raises InvalidInput, and then nothing is added.
    """
    model = trainer.model
    loss_function = _find_loss(work.loss_fn)
    batch = gather(work.data, model.vocab_size)
    logprobs_P = model.logprobs_VV[batch.previous_P, batch.next_P]
    scored = Scored(
        logprobs_P=logprobs_P,
        inputs=batch.inputs,
        config=work.loss_fn_config or {},
        starts=batch.starts,
    )
    # What is not finite is found below, and told without a warning on the way.
    with np.errstate(all="ignore"):
        loss = loss_function(scored)
        _check_loss(work.loss_fn, loss)
        if not forward_only:
            trainer.accumulate(model.gradient(batch.previous_P, batch.next_P, loss.slope_P))
    metrics = {
        "loss:sum": loss.value,
        "tokens:sum": float(len(logprobs_P)),
        "entropy:mean": float(model.entropy_V[batch.previous_P].mean()),
    }
    return ForwardBackwardOutput("ArrayRecord", _outputs(logprobs_P, batch), metrics)


def _find_loss(name: str) -> LossFunction:
    found = LOSSES.get(name)
    if found is not None:
        return found
    advice = _ADVICE.get(name)
    if advice is not None:
        raise InvalidInput(f"loss_fn {name!r} is not computed by this model; {advice}")
    raise InvalidInput(f"loss_fn {name!r} is not one of {', '.join(LOSSES)}")


def _check_loss(name: str, loss: Loss) -> None:
    if not np.isfinite(loss.value):
        raise InvalidInput(f"the {name} loss is {loss.value}; check its inputs")


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
