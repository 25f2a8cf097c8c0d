"""Reinforcement learning: sample a group of answers, score them, train on their advantages.

    python examples/rl_loop.py                                        # a server inside this process
    python examples/rl_loop.py --base-url https://host --api-key tml-... --base-model NAME

The task is a toy with a simple reward: write lower-case letters. The loop is a real one:
on-policy samples, advantages relative to the group's mean, the importance-sampling loss.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams
from tinkex.testing import StubServer, ToyTokenizer


def main() -> int:
    options = parse_options()
    with connect(options) as service:
        training = service.create_lora_training_client(options.base_model, rank=8, seed=1).result()
        tokenizer = training.get_tokenizer()
        prompt = tokenizer.encode("say: ")
        for step in range(1, options.steps + 1):
            reward = train_step(training, tokenizer, prompt, step, options)
            print(
                f"step {step:3}   mean reward {reward:.3f}   {'#' * round(40 * reward)}", flush=True
            )
        saved = training.save_weights_for_sampler("rl-final").result()
        print(f"saved {saved.path}")
    return 0


def train_step(
    training: tinkex.TrainingClient,
    tokenizer: Any,
    prompt: list[int],
    step: int,
    options: argparse.Namespace,
) -> float:
    """One round: sample with the current weights, then train on the samples."""
    sampler = training.save_weights_and_get_sampling_client().result()
    params = SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=step)
    answers = sampler.sample(ModelInput.from_ints(prompt), options.group_size, params).result()
    rewards = [reward_of(tokenizer.decode(answer.tokens)) for answer in answers.sequences]
    mean = statistics.fmean(rewards)
    data = [
        make_datum(prompt, answer, reward - mean)
        for answer, reward in zip(answers.sequences, rewards, strict=True)
        if reward != mean  # no gradient
    ]
    if data:
        forward_backward = training.forward_backward(data, "importance_sampling")
        optim_step = training.optim_step(AdamParams(learning_rate=options.learning_rate))
        forward_backward.result()
        optim_step.result()
    return mean


def reward_of(text: str) -> float:
    """Return the fraction of lower-case letters."""
    return sum("a" <= character <= "z" for character in text) / max(1, len(text))


def make_datum(prompt: list[int], answer: SampledSequence, advantage: float) -> Datum:
    """Build a datum; position i predicts token i + 1, and prompt positions have no advantage."""
    tokens = [*prompt, *answer.tokens]
    silent = [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*silent, *(answer.logprobs or [])],
            "advantages": [*silent, *([advantage] * len(answer.tokens))],
        },
    )


@contextlib.contextmanager
def connect(options: argparse.Namespace) -> Iterator[tinkex.ServiceClient]:
    """Connect to the server of --base-url, or to one in this process."""
    if options.base_url:
        with tinkex.ServiceClient(base_url=options.base_url, api_key=options.api_key) as service:
            yield service
        return
    with (
        StubServer(models=(options.base_model,)) as server,
        tinkex.ServiceClient(
            base_url=server.url,
            api_key="tml-example",
            tokenizer_loader=lambda name: ToyTokenizer(),
        ) as service,
    ):
        yield service


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", help="key for that server; default: TINKER_API_KEY")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=24, help="rounds of sampling and training")
    parser.add_argument("--group-size", type=int, default=256, help="answers per round")
    parser.add_argument("--max-tokens", type=int, default=4, help="tokens per answer")
    parser.add_argument("--learning-rate", type=float, default=0.5)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
