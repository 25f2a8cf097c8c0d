"""Workloads for both sides: deterministic data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BATCH_SIZE = 8
MIN_TOKENS, MAX_TOKENS = 32, 512
PROMPT_SHARE = 0.6
NUM_ADAPTERS = 8
ADAPTER_TOKENS = 64
NEW_TOKENS = 128
NUM_PROMPTS = 16
GROUP_PROMPT_TOKENS, GROUP_NEW_TOKENS = 512, 64
NUM_ARRIVALS, NUM_SAMPLERS = 16, 4
ARRIVAL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Example:
    """Position i of `tokens` predicts `targets[i]`; the first `num_prompt` have weight 0."""

    tokens: list[int]
    targets: list[int]
    num_prompt: int

    @property
    def weights(self) -> list[float]:
        """1 for trained targets, 0 for the prompt."""
        return [0.0] * self.num_prompt + [1.0] * (len(self.tokens) - self.num_prompt)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for greedy tokens of a sampler, and its arrival time in seconds."""

    tokens: list[int]
    num_new: int
    sampler: int = 0
    arrives_at: float = 0.0


def example(
    rng: np.random.Generator, vocab_size: int, num_tokens: int, prompt_share: float = 0.0
) -> Example:
    """Make an example of random tokens."""
    tokens = _tokens(rng, vocab_size, num_tokens + 1)
    return Example(tokens[:-1], tokens[1:], int(prompt_share * num_tokens))


def sft_batches(turn: int, num_batches: int, vocab_size: int) -> list[list[Example]]:
    """Batches of mixed lengths; turns differ in their tokens, not in their lengths."""
    lengths = np.random.default_rng(1).integers(
        MIN_TOKENS, MAX_TOKENS, endpoint=True, size=(num_batches, BATCH_SIZE)
    )
    rng = np.random.default_rng([2, turn])
    return [
        [example(rng, vocab_size, int(length), PROMPT_SHARE) for length in batch]
        for batch in lengths
    ]


def adapter_examples(turn: int, vocab_size: int) -> list[Example]:
    """One sequence for each of several adapters."""
    rng = np.random.default_rng([3, turn])
    return [example(rng, vocab_size, ADAPTER_TOKENS) for _ in range(NUM_ADAPTERS)]


def single_prompt(turn: int, vocab_size: int) -> list[Prompt]:
    """One prompt."""
    rng = np.random.default_rng([4, turn])
    return [Prompt(_tokens(rng, vocab_size, 32), NEW_TOKENS)]


def prompt_batch(turn: int, vocab_size: int) -> list[Prompt]:
    """Prompts of mixed lengths that all arrive at the start."""
    lengths = np.random.default_rng(5).integers(16, 64, endpoint=True, size=NUM_PROMPTS)
    rng = np.random.default_rng([5, turn])
    return [Prompt(_tokens(rng, vocab_size, int(length)), NEW_TOKENS) for length in lengths]


def arrivals(turn: int, vocab_size: int) -> list[Prompt]:
    """Prompts and answers of 16 to 256 tokens for several adapters, arriving over time."""
    sizes = np.exp(
        np.random.default_rng(6).uniform(np.log(16), np.log(256), size=(NUM_ARRIVALS, 2))
    ).astype(int)
    rng = np.random.default_rng([6, turn])
    return [
        Prompt(
            _tokens(rng, vocab_size, int(num_prompt)),
            int(num_new),
            sampler=index % NUM_SAMPLERS,
            arrives_at=index * ARRIVAL_SECONDS,
        )
        for index, (num_prompt, num_new) in enumerate(sizes)
    ]


def group_prompt(turn: int, vocab_size: int) -> Prompt:
    """A long prompt to draw many samples of."""
    rng = np.random.default_rng([7, turn])
    return Prompt(_tokens(rng, vocab_size, GROUP_PROMPT_TOKENS), GROUP_NEW_TOKENS)


def _tokens(rng: np.random.Generator, vocab_size: int, num: int) -> list[int]:
    # Token 0 is padding.
    tokens: list[int] = rng.integers(1, vocab_size, size=num).tolist()
    return tokens
