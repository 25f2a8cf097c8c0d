"""Training: losses, gradients, optimizer steps, saved states."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, get_args

import tinker
from tinker import types

from tests.compat.scenarios.context import (
    RANK,
    TOKENS,
    Absent,
    ScenarioContext,
    datum,
    loss_of,
    need,
    need_parameter,
    quietly,
    scenario,
    step,
)

SERVICE, TRAINING, STATE = "Service and sessions", "Training", "Saved states"


@scenario(SERVICE, "`get_server_capabilities`")
def capabilities(ctx: ScenarioContext) -> None:
    names = [model.model_name for model in ctx.service.get_server_capabilities().supported_models]
    assert ctx.base_model in names, names


@scenario(SERVICE, "`whoami` with a short-lived token")
def whoami(ctx: ScenarioContext) -> None:
    service = tinker.ServiceClient(base_url=ctx.jwt_url, api_key=ctx.jwt_key)
    answer = need(service.create_rest_client(), "whoami")().result()
    assert answer.user_urn, answer


@scenario(SERVICE, "telemetry is accepted")
def telemetry(ctx: ScenarioContext) -> None:
    if need(ctx.service, "get_telemetry")() is None:
        raise Absent("telemetry is switched off")
    wait_for_more(ctx, "telemetry", seconds=15)


@scenario(SERVICE, "heartbeats are accepted")
def heartbeats(ctx: ScenarioContext) -> None:
    assert ctx.client is not None
    wait_for_more(ctx, "session_heartbeat", seconds=25)


def wait_for_more(ctx: ScenarioContext, endpoint: str, seconds: float) -> None:
    """Wait until the server has answered at an endpoint, which it may have done already."""
    ends_at = time.monotonic() + seconds
    while not ctx.answers(endpoint):
        assert time.monotonic() < ends_at, f"no successful request to {endpoint}"
        time.sleep(0.25)


@scenario(SERVICE, "`ServiceClient.close`")
def close(ctx: ScenarioContext) -> None:
    need(tinker.ServiceClient, "close")
    service = tinker.ServiceClient(base_url=ctx.url, api_key=ctx.key)
    service.create_lora_training_client(base_model=ctx.base_model, rank=RANK)
    service.close("success").result()


@scenario(TRAINING, "`create_lora_training_client`, `get_info`")
def create_and_info(ctx: ScenarioContext) -> None:
    info = ctx.client.get_info()
    assert info.model_data.model_name == ctx.base_model, info
    assert info.lora_rank in {None, RANK}, info


@scenario(TRAINING, "`get_tokenizer` without a network")
def tokenizer(ctx: ScenarioContext) -> None:
    found = ctx.client.get_tokenizer()
    text = "What is 3 plus 4?"
    assert found.decode(found.encode(text)) == text


@scenario(TRAINING, "`forward`")
def forward(ctx: ScenarioContext) -> None:
    output = ctx.client.forward([datum()], "cross_entropy").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].tolist()
    assert len(logprobs) == len(TOKENS) - 1
    assert math.isclose(-sum(logprobs), output.metrics["loss:sum"], rel_tol=1e-4)


@scenario(TRAINING, "`forward_backward`, `optim_step`: the loss falls")
def learning(ctx: ScenarioContext) -> None:
    client = ctx.service.create_lora_training_client(base_model=ctx.base_model, rank=RANK, seed=1)
    losses = [step(client) for _ in range(6)]
    assert losses[-1] < 0.99 * losses[0], losses


@scenario(TRAINING, "a batch of many examples, in order")
def many_examples(ctx: ScenarioContext) -> None:
    texts = [[7, 8 + index, 9] for index in range(40)]
    output = ctx.client.forward([datum(text) for text in texts], "cross_entropy").result()
    alone = ctx.client.forward([datum(texts[-1])], "cross_entropy").result()
    rows = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    assert len(rows) == len(texts)
    expected = alone.loss_fn_outputs[0]["logprobs"].tolist()
    assert all(math.isclose(*pair, abs_tol=1e-4) for pair in zip(rows[-1], expected, strict=True))


@scenario(TRAINING, "policy losses: `importance_sampling`, `ppo`, and later ones")
def policy_losses(ctx: ScenarioContext) -> None:
    output = ctx.client.forward([datum()], "cross_entropy").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].tolist()
    example = datum(logprobs=logprobs, advantages=[0.5] * len(logprobs))
    offered = {"importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"}
    known = set(get_args(types.LossFnType)) & offered
    assert {"importance_sampling", "ppo"} <= known, known
    for loss in sorted(known):
        value = ctx.client.forward_backward([example], loss).result().metrics["loss:sum"]
        assert math.isfinite(value), (loss, value)
        if loss in {"importance_sampling", "ppo"}:
            assert math.isclose(value, -0.5 * len(logprobs), rel_tol=1e-3), (loss, value)


@scenario(TRAINING, "the `dimuon` optimizer")
def dimuon(ctx: ScenarioContext) -> None:
    params = need(types, "DimuonParams")(learning_rate=0.1)
    config = need(types, "DimuonOptimizerConfig")()
    create = ctx.service.create_lora_training_client
    client = create(base_model=ctx.base_model, rank=RANK, optimizer=config)
    losses = []
    for _ in range(4):
        losses.append(client.forward_backward([datum()], "cross_entropy").result())
        client.optim_step(params).result()
    assert losses[-1].metrics["loss:sum"] < losses[0].metrics["loss:sum"], losses


@scenario(TRAINING, "`forward_backward_custom`")
def custom_loss(ctx: ScenarioContext) -> None:
    def squares(data: Any, logprobs: Any) -> Any:
        return sum((row**2).sum() for row in logprobs), {"rows": float(len(data))}

    before = ctx.client.forward([datum()], "cross_entropy").result()
    values = before.loss_fn_outputs[0]["logprobs"].tolist()
    ctx.client.forward_backward_custom([datum()], squares).result()
    assert values and ctx.client.optim_step(types.AdamParams(learning_rate=0.0)).result()


@scenario(TRAINING, "`forward_async`, `forward_backward_async`, `optim_step_async`")
def training_async(ctx: ScenarioContext) -> None:
    async def train() -> list[float]:
        create = ctx.service.create_lora_training_client_async
        client = await create(base_model=ctx.base_model, rank=RANK)
        losses = []
        for _ in range(4):
            passed = await client.forward_backward_async([datum()], "cross_entropy")
            moved = await client.optim_step_async(types.AdamParams(learning_rate=0.01))
            losses.append((await passed.result_async()).metrics["loss:sum"])
            await moved.result_async()
        last = await (await client.forward_async([datum()], "cross_entropy")).result_async()
        return [*losses, last.metrics["loss:sum"]]

    losses = asyncio.run(train())
    assert losses[-1] < losses[0], losses


@scenario(STATE, "`save_state`, `load_state`")
def load_state(ctx: ScenarioContext) -> None:
    path, before = ctx.state, loss_of(ctx.client)
    step(ctx.client)
    assert loss_of(ctx.client) != before
    quietly(lambda: ctx.client.load_state(path).result())
    assert math.isclose(loss_of(ctx.client), before, rel_tol=1e-5)


@scenario(STATE, "`load_state_with_optimizer`")
def load_state_with_optimizer(ctx: ScenarioContext) -> None:
    load = need(ctx.client, "load_state_with_optimizer")
    path, before = ctx.spare("with-optimizer"), loss_of(ctx.client)
    step(ctx.client)
    ahead = step(ctx.client)
    quietly(lambda: load(path).result())
    assert math.isclose(step(ctx.client), before, rel_tol=1e-5)
    assert math.isclose(step(ctx.client), ahead, rel_tol=1e-4), "the optimizer state was restored"


@scenario(STATE, "`create_training_client_from_state`")
def from_state(ctx: ScenarioContext) -> None:
    path, before = ctx.spare("from-state"), loss_of(ctx.client)
    resumed = ctx.service.create_training_client_from_state(path)
    assert math.isclose(loss_of(resumed), before, rel_tol=1e-5)


@scenario(STATE, "`create_training_client_from_state_with_optimizer`")
def from_state_with_optimizer(ctx: ScenarioContext) -> None:
    create = need(ctx.service, "create_training_client_from_state_with_optimizer")
    path = ctx.spare("from-state-with-optimizer")
    ahead = [step(ctx.client) for _ in range(3)]
    resumed = create(path)
    again = [step(resumed) for _ in range(3)]
    assert all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(ahead, again, strict=True))


@scenario(STATE, "`save_state` with `ttl_seconds`")
def save_with_ttl(ctx: ScenarioContext) -> None:
    need_parameter(ctx.client.save_state, "ttl_seconds")
    path = ctx.client.save_state("expiring", ttl_seconds=7200).result().path
    [found] = [
        each
        for each in ctx.rest.list_checkpoints(ctx.model_id).result().checkpoints
        if each.tinker_path == path
    ]
    if not hasattr(found, "expires_at"):
        raise Absent("expires_at")
    assert found.expires_at is not None, found
