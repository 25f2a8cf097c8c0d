"""Scores training examples and prompts with a bigram model.

Shape letters: P pairs of (previous token, next token) of all examples.
"""

from __future__ import annotations

import sys

import numpy as np

from tinkex.engine.examples import parse_examples
from tinkex.engine.fake.bigram import Bigram, BigramTrainer, Floats, Tokens
from tinkex.engine.losses import check_loss, compute_loss, sum_metrics
from tinkex.engine.micro_batches import pack_examples
from tinkex.types import (
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
)

#: The token for every position of an image or audio chunk.
PLACEHOLDER_TOKEN = 511


def flatten_tokens(model_input: ModelInput) -> list[int]:
    """The tokens of a prompt, with placeholders for chunks that are not text."""
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


def run_pass(
    trainer: BigramTrainer,
    request: ForwardBackwardInput,
    *,
    forward_only: bool,
    max_context_tokens: int = sys.maxsize,
) -> ForwardBackwardOutput:
    """Score the examples and, unless `forward_only`, accumulate their gradient.

    Raises InvalidInput if an example cannot be scored; then nothing is accumulated.
    """
    model = trainer.model
    examples = parse_examples(
        request, vocab_size=model.vocab_size, max_context_tokens=max_context_tokens
    )
    packed = pack_examples(examples)
    previous_P = packed.tokens_T[packed.rows_P]
    parts = packed.split_by_example(model.logprobs_VV[previous_P, packed.targets_P])
    loss = compute_loss(request, examples, parts)
    check_loss(request.loss_fn, loss)
    if not forward_only:
        # `accumulate` reports non-finite values, so NumPy need not warn about them.
        with np.errstate(all="ignore"):
            trainer.accumulate(model.gradient(previous_P, packed.targets_P, loss.grad_P))
    metrics = {
        **sum_metrics([loss]),
        "tokens:sum": float(len(packed.tokens_T)),
        "entropy:mean": float(model.entropy_V[packed.tokens_T].mean()),
    }
    outputs = [example.to_output(part) for example, part in zip(examples, parts, strict=True)]
    return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


def score_tokens(model: Bigram, tokens: Tokens) -> Floats:
    """The log-probability of every token but the first, given its predecessor."""
    scores: Floats = model.logprobs_VV[tokens[:-1], tokens[1:]]
    return scores
