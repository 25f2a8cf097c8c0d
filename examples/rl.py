"""Reinforcement learning on one page: a reward for every answer, a group per prompt.

    python examples/rl.py                                         # a server inside this process
    python examples/rl.py --base-url https://host --api-key tml-... --base-model NAME

The reward is a toy, the share of small letters. `tinkex train rl` takes a function of your own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams
from tinkex.testing import StubServer, ToyTokenizer

GROUP_SIZE, MAX_TOKENS = 64, 4
DATA = Path(__file__).parent / "data" / "rl.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", default="tml-example", help="key for that server")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"base_url": options.base_url}
        if not options.base_url:
            server = stack.enter_context(StubServer(models=(options.base_model,)))
            settings = {"base_url": server.url, "tokenizer_loader": lambda name: ToyTokenizer()}
        service = stack.enter_context(tinkex.ServiceClient(api_key=options.api_key, **settings))
        training = service.create_lora_training_client(options.base_model, rank=8, seed=0)
        train(training, rows, options.steps)
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
