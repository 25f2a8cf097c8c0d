"""Reinforcement learning on one page: a reward for every answer, a group per prompt.

    python examples/rl.py                                         # a server inside this process
    python examples/rl.py --base-url https://host --api-key tml-... --base-model NAME

The reward is a toy, the share of small letters. `tinkex train rl` takes a function of your own.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from connection import training_client

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

GROUP_SIZE, MAX_TOKENS = 64, 4
DATA = Path(__file__).parent / "data" / "rl.jsonl"


def main() -> None:
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    with training_client(__doc__, num_steps=15) as (training, num_steps):
        train(training, rows, num_steps)
        print(f"saved {training.save_weights_for_sampler('rl').result().path}")


def train(training: tinkex.TrainingClient, rows: list[Any], num_steps: int) -> None:
    tokenizer = training.get_tokenizer()
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    for step in range(1, num_steps + 1):
        sampler = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=step)
        drawn = [sampler.sample(ModelInput.from_ints(p), GROUP_SIZE, params) for p in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, drawn, strict=True):
            answers = future.result().sequences
            group = [reward(tokenizer.decode(answer.tokens)) for answer in answers]
            rewards += group
            for answer, worth in zip(answers, group, strict=True):
                data.append(make_datum(prompt, answer, worth - fmean(group)))
        training.forward_backward(data, "importance_sampling")
        training.optim_step(AdamParams(learning_rate=0.5)).result()
        print(f"step {step:3}   mean reward {fmean(rewards):.3f}", flush=True)


def reward(text: str) -> float:
    """The share of small letters."""
    return sum("a" <= letter <= "z" for letter in text) / max(1, len(text))


def make_datum(prompt: list[int], answer: SampledSequence, advantage: float) -> Datum:
    """Position i predicts token i + 1; the prompt's own positions carry no advantage."""
    tokens, silent = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1)
    logprobs = [*silent, *(answer.logprobs or [])]
    advantages = [*silent, *([advantage] * len(answer.tokens))]
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main()
