"""Training with large batches through the official SDK."""

from __future__ import annotations

from typing import Any

from tests.acceptance.engine.scenario_context import (
    BASE_MODEL,
    ScenarioContext,
    connect,
    example,
    fetch_adapter,
    prompt_of,
    text,
)

NUM_STEPS = 6


def train(context: ScenarioContext) -> dict[str, Any]:
    """Train one model with accumulated batches, a custom loss and samples; returns all results."""
    import tinker

    seen: list[Any] = []
    with connect(context) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3)
        for number in range(NUM_STEPS):
            halves = [_batch(10 * number + half) for half in range(2)]
            passes = [client.forward_backward(data, "cross_entropy") for data in halves]
            passes.append(client.forward_backward_custom(halves[0], _squared_logprobs))
            step = client.optim_step(tinker.AdamParams(learning_rate=1e-2))
            seen += [dict(each.result().metrics) for each in (*passes, step)]
        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=20, seed=1, stop=[])
        drawn = sampler.sample(prompt_of(text(1, 4)), 2, params).result().sequences
        seen.append([list(one.tokens) for one in drawn])
        files = fetch_adapter(context, client, "last", 0)
    return {"seen": seen, "adapter": files["adapter_model.safetensors"]}


def _batch(seed: int) -> list[Any]:
    return [example(text(seed, 4), text(100 * seed + n, 8 + 5 * n)) for n in range(11)]


def _squared_logprobs(data: Any, logprobs: Any) -> Any:
    loss = sum((each**2).sum() for each in logprobs) / len(data)
    return loss, {"custom": float(loss.detach())}
