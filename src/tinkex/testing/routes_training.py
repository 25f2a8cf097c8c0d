"""Training: models, passes and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tinkex import types
from tinkex.engine.fake.bigram import BigramTrainer, OptimStepParams
from tinkex.engine.fake.scoring import run_pass
from tinkex.errors import InvalidInput
from tinkex.testing.answers import Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.ledger import TRAINING
from tinkex.testing.promises import Work
from tinkex.testing.state import Handler, Model, Session, World
from tinkex.testing.weights import Recipe
from tinkex.wire.codec import decode_json


def create_model(world: World, call: Call) -> Answer:
    """Promise a new model; the same number in the same session is the same model."""
    request = world.read(call, types.CreateModelRequest)
    session = world.session(call.tenant, request.session_id)
    key = ("model", session.session_id, request.model_seq_id)
    job = world.promises.same(key)
    model_id = model_id_of(session, request.model_seq_id)
    if job is None:
        add_model(world, session, request.model_seq_id, _recipe(request), request.user_metadata)
        job = world.promises.make(call.tenant, call.endpoint, key)
        world.start(job, lambda: {"model_id": model_id, "type": "create_model"})
    return world.promise(job, model_id)


def _recipe(request: types.CreateModelRequest) -> Recipe:
    lora = request.lora_config or types.LoraConfig(rank=32)
    return Recipe(
        base_model=request.base_model,
        rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        optimizer_config=msgspec.to_builtins(
            request.optimizer_config, enc_hook=lambda config: config.to_wire()
        ),
    )


def model_id_of(session: Session, model_seq_id: int) -> str:
    """The id of a session's nth model, which clients may work out themselves."""
    return f"{session.session_id}:train:{model_seq_id}"


def add_model(
    world: World,
    session: Session,
    model_seq_id: int,
    recipe: Recipe,
    user_metadata: dict[str, Any] | None,
) -> Model:
    """Make a model that starts from its base."""
    model = Model(
        model_id=model_id_of(session, model_seq_id),
        tenant=session.tenant,
        session=session,
        recipe=recipe,
        trainer=BigramTrainer(world.base_model(recipe.base_model)),
        turns=world.new_turns(),
        account=world.ledger.account(session.tenant, session.session_id, recipe.base_model),
        user_metadata=user_metadata,
    )
    world.models[model.model_id] = model
    return model


def forward_backward(world: World, call: Call) -> Answer:
    """Promise a pass; protobuf or JSON, whichever the dialect reads."""
    request, forward_only = _read_pass(world, call)
    model = world.model(call.tenant, request.model_id)
    work = _pass(model, request.forward_backward_input, forward_only)
    kind = "forward" if forward_only else "forward_backward"
    # Protobuf has no missing number: an absent one arrives as 0.
    return world.enqueue(call, model, request.seq_id or None, work, kind)


def _read_pass(world: World, call: Call) -> tuple[types.ForwardBackwardRequest, bool]:
    readable = world.dialect.reads_proto if call.is_proto else world.dialect.reads_json
    if not readable:
        content_type = call.headers.get("content-type", "")
        raise Refusal(415, f"forward_backward is not read as {content_type!r} here")
    try:
        if call.is_proto:
            return call.message, call.forward_only
        return decode_json(call.body, types.ForwardBackwardRequest), False
    except (msgspec.DecodeError, InvalidInput, ValueError) as error:
        raise Refusal(422, f"forward_backward: {error}") from None


def forward(world: World, call: Call) -> Answer:
    """Promise a pass without gradients, as older clients ask for it."""
    request = world.read(call, types.ForwardRequest)
    model = world.model(call.tenant, request.model_id)
    work = _pass(model, request.forward_input, forward_only=True)
    return world.enqueue(call, model, request.seq_id, work)


def _pass(model: Model, work: types.ForwardBackwardInput, forward_only: bool) -> Work:
    def run() -> types.ForwardBackwardOutput:
        output = run_pass(model.trainer, work, forward_only=forward_only)
        model.account.count(TRAINING, int(output.metrics["tokens:sum"]))
        if not forward_only:
            model.progress.add_pass(output.metrics)
        return output

    return run


def optim_step(world: World, call: Call) -> Answer:
    """Promise an optimizer step."""
    request = world.read(call, types.OptimStepRequest)
    model = world.model(call.tenant, request.model_id)
    work = _step(model, request.optim_params)

    def run() -> dict[str, Any]:
        metrics = work()
        model.progress.add_step(metrics, request.seq_id)
        return {"metrics": metrics}

    return world.enqueue(call, model, request.seq_id, run)


def _step(model: Model, params: Any) -> Callable[[], dict[str, float]]:
    if isinstance(params, types.AdamParams):
        size = OptimStepParams(
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.grad_clip_norm,
        )
        return lambda: model.trainer.adamw_step(size)
    size = OptimStepParams(
        learning_rate=params.learning_rate,
        beta1=getattr(params, "beta1", 0.9),
        grad_clip_norm=getattr(params, "grad_clip_norm", 0.0),
    )
    return lambda: model.trainer.momentum_step(size)


def create_custom_loss(world: World, call: Call) -> Answer:
    """Promise to remember a loss; its graph is not evaluated, so it cannot be trained with."""
    request = world.read(call, types.CreateCustomLossRequest)
    session = world.session(call.tenant, request.session_id)
    key = ("loss", session.session_id, request.custom_loss_seq_id)
    job = world.promises.same(key)
    if job is None:
        loss_id = f"{session.session_id}:loss:{request.custom_loss_seq_id}"
        job = world.promises.make(call.tenant, call.endpoint, key)
        world.start(job, lambda: {"loss_id": loss_id})
    return world.promise(job)


def get_info(world: World, call: Call) -> Answer:
    """Describe a model."""
    request = world.read(call, types.GetInfoRequest)
    model = world.model(call.tenant, request.model_id)
    name = model.recipe.base_model
    return json_answer(
        {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {"arch": "bigram", "model_name": name, "tokenizer_id": name},
            "optimizer_config": model.recipe.optimizer_config,
            "is_lora": True,
            "lora_rank": model.recipe.rank,
            "model_name": name,
        }
    )


def unload_model(world: World, call: Call) -> Answer:
    """Promise to forget a model's live state."""
    request = world.read(call, types.UnloadModelRequest)
    model = world.model(call.tenant, request.model_id)
    job = world.promises.make(call.tenant, call.endpoint)

    def unload() -> dict[str, str]:
        model.is_unloaded = True
        return {"model_id": model.model_id, "type": "unload_model"}

    world.start(job, unload)
    return world.promise(job, model.model_id)


ROUTES: dict[str, Handler] = {
    "create_model": create_model,
    "forward_backward": forward_backward,
    "forward": forward,
    "optim_step": optim_step,
    "create_custom_loss": create_custom_loss,
    "get_info": get_info,
    "unload_model": unload_model,
}
