"""Several tenants and several base models on one server are independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from tests.acceptance.engine.scenario_context import (
    ScenarioContext,
    connect,
    error_text,
    example,
    fetch_adapter,
    max_difference,
    prompt_of,
    step,
    text,
    weights_of,
)
from tests.support.engine_server import FEW_TOKENS

RANKS = (1, 4, 16, 32)
NUM_STEPS = 5
TOLERANCE = 1e-5


def examples(rank: int, number: int) -> list[Any]:
    """Different data and lengths for every tenant."""
    seed = 100 * rank + 10 * number
    return [example(text(seed + index, 3), text(seed - index, 4 + index)) for index in range(4)]


def train_concurrently(context: ScenarioContext) -> list[str]:
    """Queued passes of all tenants run together; each has the same result as alone.

    Returns the models that were trained together.
    """
    import tinker

    adam = tinker.AdamParams(learning_rate=1e-2)
    with ExitStack() as stack:
        services = [stack.enter_context(connect(context, tenant)) for tenant in range(len(RANKS))]
        clients = [
            service.create_lora_training_client("tiny", rank=rank, seed=rank)
            for service, rank in zip(services, RANKS, strict=True)
        ]
        # A long pass, so that all following ones are queued meanwhile.
        long = [example(text(seed, 4), text(seed, 400)) for seed in range(20)]
        waiting = [clients[-1].forward(long, "cross_entropy")]
        for number in range(NUM_STEPS):
            for client, rank in zip(clients, RANKS, strict=True):
                waiting.append(client.forward_backward(examples(rank, number), "cross_entropy"))
            waiting += [client.optim_step(adam) for client in clients]
        for each in waiting:
            each.result()
        for tenant, (client, rank) in enumerate(zip(clients, RANKS, strict=True)):
            together = weights_of(fetch_adapter(context, client, "together", tenant))
            alone = services[tenant].create_lora_training_client("tiny", rank=rank, seed=rank)
            for number in range(NUM_STEPS):
                step(alone, examples(rank, number))
            found = weights_of(fetch_adapter(context, alone, "alone", tenant))
            assert max_difference(together, found) <= TOLERANCE, rank
    return [client.model_id for client in clients]


# --- mistakes ------------------------------------------------------------------------------------


def send_invalid_requests(context: ScenarioContext) -> None:
    """Each invalid request gives its tenant one error, and does not affect the other tenant."""
    import tinker

    with connect(context, 0) as invalid_tenant, connect(context, 1) as valid_tenant:
        bad = invalid_tenant.create_lora_training_client("other", rank=4, seed=1)
        good = valid_tenant.create_lora_training_client("other", rank=4, seed=1)
        model = valid_tenant.create_lora_training_client("other", rank=4, seed=1)
        for number, (call, words) in enumerate(_invalid_calls(bad)):
            pending = good.forward_backward(examples(1, number), "cross_entropy")
            message = error_text(call)
            assert all(word in message for word in words), message
            passed = pending.result().metrics
            moved = good.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics
            assert (passed, moved) == step(model, examples(1, number))
        # Invalid requests leave no gradient, and training continues.
        model = valid_tenant.create_lora_training_client("other", rank=4, seed=1)
        for number in range(2):
            assert step(bad, examples(1, number)) == step(model, examples(1, number))


def _invalid_calls(client: Any) -> list[tuple[Callable[[], Any], Sequence[str]]]:
    import tinker

    fine = example(text(1, 4), text(2, 5))
    unknown = example(text(1, 4), [5, 259, 6])
    unread = tinker.Datum(
        model_input=prompt_of([5, 100_000, 6]),
        loss_fn_inputs={"target_tokens": [4, 5, 6], "weights": [1.0] * 3},
    )
    long = example(text(1, 4), text(2, FEW_TOKENS))
    nothing = example(text(1, 4), text(2, 5), weights=[np.nan] * 5)
    # Each input is finite, but the gradient is not.
    too_much = example(text(1, 4), text(2, 5), weights=[3e38] * 5)

    def passes(data: list[Any], loss_fn: str = "cross_entropy") -> Callable[[], Any]:
        return lambda: client.forward_backward(data, loss_fn).result()

    def learn_too_much() -> None:
        assert passes([fine, too_much])().metrics["nonfinite_gradient:max"] == 1.0
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()

    return [
        (passes([fine, unknown]), ["259"]),
        (passes([fine, unread]), ["100000"]),
        (passes([long]), [str(FEW_TOKENS + 3), str(FEW_TOKENS)]),
        (passes([fine], "least_squares"), ["least_squares", "cross_entropy"]),
        (passes([fine], "ppo"), ["logprobs"]),
        (passes([fine, nothing]), ["weights", "nan"]),
        (learn_too_much, ["NaN or infinity"]),
    ]


def send_invalid_sample_requests(context: ScenarioContext) -> None:
    """Invalid sample requests give one error, and do not affect other samples."""
    import tinker

    with connect(context, 0) as invalid_tenant, connect(context, 1) as valid_tenant:
        bad = invalid_tenant.create_sampling_client(base_model="other")
        good = valid_tenant.create_sampling_client(base_model="other")
        params = tinker.SamplingParams(max_tokens=20, seed=1, stop=[])
        prompt = prompt_of(text(1, 4))
        expected = good.sample(prompt, 2, params).result().sequences
        for tokens, options, word in (
            ([5, 300], {"max_tokens": 4}, "300"),
            (text(1, FEW_TOKENS + 1), {"max_tokens": 4}, str(FEW_TOKENS)),
            ([5, 6], {"max_tokens": 4, "temperature": -1.0}, "temperature"),
        ):
            pending = good.sample(prompt, 2, params)
            wrong = tinker.SamplingParams(**options)
            message = error_text(
                lambda tokens=tokens, wrong=wrong: bad.sample(prompt_of(tokens), 1, wrong).result()
            )
            assert word in message, message
            found = pending.result().sequences
            assert [one.tokens for one in found] == [one.tokens for one in expected]


# --- several base models --------------------------------------------------------------------------


def use_both_models(context: ScenarioContext) -> None:
    """Each model has its own weights, context and adapters; the error for others lists them."""
    import tinker

    with connect(context) as service:
        offered = service.get_server_capabilities().supported_models
        # The built-in model is listed too, after the configured ones.
        assert offered[-1].model_name == "tinkex/tiny"
        served = offered[:-1]
        assert [(each.model_name, each.max_context_length) for each in served] == [
            ("tiny", 512),
            ("other", FEW_TOKENS),
        ]
        clients = {
            each.model_name: service.create_lora_training_client(each.model_name, rank=4, seed=1)
            for each in served
        }
        waiting = [
            client.forward_backward(examples(1, 0), "cross_entropy") for client in clients.values()
        ]
        first, second = (each.result().metrics["loss:sum"] for each in waiting)
        assert first != second
        params = tinker.SamplingParams(max_tokens=12, seed=1, stop=[])
        drawn = {}
        for name, client in clients.items():
            assert client.get_info().model_data.model_name == name
            plain = service.create_sampling_client(base_model=name)
            assert plain.get_base_model() == name
            base = plain.sample(prompt_of(text(1, 4)), 1, params).result().sequences[0]
            untrained = client.save_weights_and_get_sampling_client()
            own = untrained.sample(prompt_of(text(1, 4)), 1, params).result().sequences[0]
            assert own.tokens == base.tokens, "a new adapter changes nothing"
            drawn[name] = base.tokens
        assert drawn["tiny"] != drawn["other"]
        for call in (service.create_lora_training_client, service.create_sampling_client):
            message = error_text(lambda call=call: call(base_model="absent/model"))
            assert all(word in message for word in ("'absent/model'", "tiny", "other")), message
