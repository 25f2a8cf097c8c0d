"""Training, saving, loading and sampling with the official SDK while workers are killed."""

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

NUM_STEPS = 16
RANKS = (4, 8)


def train(context: ScenarioContext) -> dict[str, Any]:
    """Train two models of two tenants; returns all results."""
    seen: list[Any] = []
    with connect(context, 0) as first, connect(context, 1) as second:
        services = (first, second)
        clients = [
            service.create_lora_training_client(BASE_MODEL, rank=rank, seed=rank)
            for service, rank in zip(services, RANKS, strict=True)
        ]
        for number in range(NUM_STEPS):
            seen += _step(clients, number)
            if number % 5 == 2:
                seen += [_sample(client, number) for client in clients]
            if number % 5 == 4:
                paths = [client.save_state(f"step-{number}").result().path for client in clients]
                # Continue with models created from the checkpoints.
                clients = [
                    service.create_training_client_from_state_with_optimizer(path)
                    for service, path in zip(services, paths, strict=True)
                ]
        files = [
            fetch_adapter(context, client, "last", tenant) for tenant, client in enumerate(clients)
        ]
    return {"seen": seen, "adapters": [each["adapter_model.safetensors"] for each in files]}


def _step(clients: list[Any], number: int) -> list[Any]:
    import tinker

    waiting = []
    for client in clients:
        for half in range(2):
            data = [example(text(number, 4), text(10 * number + half + 1, 6 + half))]
            waiting.append(client.forward_backward(data, "cross_entropy"))
        waiting.append(client.optim_step(tinker.AdamParams(learning_rate=1e-2)))
    return [dict(each.result().metrics) for each in waiting]


def _sample(client: Any, seed: int) -> list[list[int]]:
    import tinker

    sampler = client.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=40, seed=seed, stop=[])
    drawn = sampler.sample(prompt_of(text(seed, 4)), 3, params).result().sequences
    return [list(one.tokens) for one in drawn]
