"""Typical training loops with the official SDK: supervised, RL and DPO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.acceptance.engine.scenario_context import (
    BASE_MODEL,
    ScenarioContext,
    connect,
    example,
    logprobs_of,
    prompt_of,
    step,
    text,
)

SAYINGS = {
    "the sky is": " blue and wide",
    "two and two": " make four",
    "cats like": " warm milk",
    "ask me": " later, please!",
}


def supervised_loop(context: ScenarioContext) -> None:
    """The loss approaches zero, and greedy samples are the learned texts."""
    import tinker

    with connect(context) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=16, seed=1)
        tokenizer = client.get_tokenizer()
        pairs = {
            question: ([*tokenizer.encode(question)], [*tokenizer.encode(answer), 2])
            for question, answer in SAYINGS.items()
        }
        data = [example(*pair) for pair in pairs.values()]
        num_tokens = sum(len(answer) for _, answer in pairs.values())
        losses = [step(client, data)[0]["loss:sum"] / num_tokens for _ in range(40)]
        assert losses[0] > 2.0, "there is nothing to learn"
        assert losses[-1] < 0.05, losses
        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=40, temperature=0.0)
        for question, answer in SAYINGS.items():
            prompt = prompt_of(pairs[question][0])
            (drawn,) = sampler.sample(prompt, 1, params).result().sequences
            assert drawn.stop_reason == "stop"
            assert tokenizer.decode(drawn.tokens) == f"{answer}<|end|>"


# --- RL ------------------------------------------------------------------------------------------

NUM_ROUNDS = 11
GROUP = 16
NUM_TOKENS = 8


def reward_of(tokens: Sequence[int]) -> float:
    """The share of tokens from the upper half of the vocabulary."""
    return sum(token >= 131 for token in tokens) / len(tokens)


def rl_loop(context: ScenarioContext, loss_fn: str) -> list[float]:
    """Train with groups of samples and centered advantages; returns the mean reward per round."""
    import tinker

    prompts = [text(seed, 4) for seed in range(3)]
    rewards = []
    with connect(context) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1)
        for number in range(NUM_ROUNDS):
            sampler = client.save_weights_and_get_sampling_client()
            params = tinker.SamplingParams(max_tokens=NUM_TOKENS, seed=number, stop=[])
            drawn = [sampler.sample(prompt_of(prompt), GROUP, params) for prompt in prompts]
            groups = [each.result().sequences for each in drawn]
            data = [
                datum
                for prompt, group in zip(prompts, groups, strict=True)
                for datum in _rl_examples(prompt, group)
            ]
            # Twice, so that the second step is off-policy.
            for _ in range(2):
                step(client, data, loss_fn, learning_rate=1e-2)
            found = [reward_of(one.tokens) for group in groups for one in group]
            rewards.append(float(np.mean(found)))
    return rewards


def _rl_examples(prompt: Sequence[int], group: Sequence[Any]) -> list[Any]:
    rewards = np.array([reward_of(one.tokens) for one in group])
    advantages = rewards - rewards.mean()
    return [
        example(prompt, one.tokens, logprobs=one.logprobs, advantages=[advantage] * len(one.tokens))
        for one, advantage in zip(group, advantages, strict=True)
    ]


# --- DPO -----------------------------------------------------------------------------------------

NUM_PAIRS = 6
BETA = 0.1


def dpo_loop(context: ScenarioContext) -> None:
    """DPO with a custom loss: the margin of chosen over rejected texts grows."""
    prompts = [text(seed, 5) for seed in range(NUM_PAIRS)]
    chosen = [example(prompt, text(100 + index, 7)) for index, prompt in enumerate(prompts)]
    rejected = [example(prompt, text(200 + index, 7)) for index, prompt in enumerate(prompts)]
    with connect(context) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1)
        before = logprobs_of(client, [*chosen, *rejected])
        loss = _dpo([float(logprobs[4:].sum()) for logprobs in before])
        metrics = []
        for _ in range(15):
            passed = client.forward_backward_custom([*chosen, *rejected], loss).result()
            metrics.append(passed.metrics)
            _optim_step(client)
        assert abs(metrics[0]["margin:mean"]) < 1e-5, "a new adapter changes nothing"
        assert abs(metrics[0]["loss:sum"] - NUM_PAIRS * np.log(2.0)) < 1e-4
        assert metrics[-1]["accuracy:mean"] == 1.0, metrics[-1]
        assert metrics[-1]["margin:mean"] > 1.0, metrics[-1]
        assert metrics[-1]["loss:sum"] < 0.5 * metrics[0]["loss:sum"], metrics[-1]


def _dpo(reference: Sequence[float]) -> Callable[[Any, Any], tuple[Any, dict[str, float]]]:
    def loss(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        import torch

        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        sums = [(own * one).sum() for own, one in zip(weights, logprobs, strict=True)]
        gains = torch.stack(sums) - torch.tensor(reference)
        margins = BETA * (gains[:NUM_PAIRS] - gains[NUM_PAIRS:])
        metrics = {
            "margin:mean": margins.mean().item(),
            "accuracy:mean": (margins > 0).float().mean().item(),
        }
        return -torch.nn.functional.logsigmoid(margins).sum(), metrics

    return loss


def _optim_step(client: Any) -> None:
    import tinker

    client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
