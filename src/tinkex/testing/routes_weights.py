"""Saving, loading and sharing weights."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tinkex import clock, types
from tinkex.errors import InvalidInput
from tinkex.ids import TinkerPath, check_name, check_ttl, new_id
from tinkex.testing.answers import JSON_TYPE, Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.downloads import archive_url, file_urls
from tinkex.testing.ledger import CHECKPOINT
from tinkex.testing.promises import WorkFailed
from tinkex.testing.routes_sampling import add_sampling_session
from tinkex.testing.routes_training import add_model, model_id_of
from tinkex.testing.state import Handler, Model, World, once_per_key
from tinkex.testing.weights import Checkpoint
from tinkex.wire.messages import TtlRequest, WeightsInfoRequest


def save_weights(world: World, call: Call) -> Answer:
    """Promise a training checkpoint: weights and the optimizer's memory."""
    request = world.read(call, types.SaveWeightsRequest)
    model = world.model(call.tenant, request.model_id)

    def save() -> dict[str, str]:
        path = _path(model, "weights", request.path or f"{request.seq_id or 0:06d}")
        if world.vault.find(str(path)) is not None and not request.overwrite:
            raise WorkFailed(f"checkpoint {path} exists already; pass overwrite=True to replace it")
        _keep(world, model, path, request.ttl_seconds, request.user_metadata)
        return {"path": str(path), "type": "save_weights"}

    return world.enqueue(call, model, request.seq_id, save)


def save_weights_for_sampler(world: World, call: Call) -> Answer:
    """Promise weights to sample from: named, or for one new sampling session."""
    request = world.read(call, types.SaveWeightsForSamplerRequest)
    model = world.model(call.tenant, request.model_id)

    def save() -> dict[str, str]:
        reply = {"type": "save_weights_for_sampler"}
        if request.path is not None:
            path = _path(model, "sampler_weights", request.path)
            _keep(world, model, path, request.ttl_seconds, request.user_metadata)
            return {**reply, "path": str(path)}
        sampling = add_sampling_session(
            world,
            model.session,
            request.sampling_session_seq_id or 0,
            model.trainer.model,
            base_model=model.recipe.base_model,
        )
        return {**reply, "sampling_session_id": sampling.sampler_id}

    return world.enqueue(call, model, request.seq_id, save)


def save_weights_external(world: World, call: Call) -> Answer:
    """Promise weights in files that other tools read."""
    request = world.read(call, types.SaveWeightsExternalRequest)
    model = world.model(call.tenant, request.model_id)

    def save() -> dict[str, Any]:
        path = _path(model, "external_weights", request.path)
        kept = _keep(world, model, path, request.ttl_seconds, None)
        size = sum(map(len, kept.files().values()))
        return {"path": str(path), "size_bytes": size, "type": "save_weights_external"}

    return world.enqueue(call, model, request.seq_id, save)


def _path(model: Model, segment: str, name: str) -> TinkerPath:
    return TinkerPath(model.model_id, segment, check_name(name))


def _keep(
    world: World,
    model: Model,
    path: TinkerPath,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, Any] | None,
) -> Checkpoint:
    try:
        check_ttl(ttl_seconds)
    except InvalidInput as error:
        raise WorkFailed(error.message) from None
    checkpoint = Checkpoint(
        path=path,
        tenant=model.tenant,
        recipe=model.recipe,
        model=model.trainer.model,
        moments=model.trainer.moments if path.segment == "weights" else None,
        user_metadata=user_metadata,
    )
    checkpoint.set_ttl(ttl_seconds)
    world.vault.add(checkpoint)
    _note(world, model.tenant, "checkpoint_created", checkpoint)
    model.account.count(CHECKPOINT, 1)
    return checkpoint


def _note(world: World, tenant: str, event: str, checkpoint: Checkpoint) -> None:
    path = checkpoint.path
    world.ledger.note(tenant, event, tinker_path=str(path), model_id=path.run_id)


def load_weights(world: World, call: Call) -> Answer:
    """Promise to load weights into a model, or into one that is made for them."""
    request = world.read(call, types.LoadWeightsRequest)
    if request.model_id is None:
        return _create_by_load(world, call, request)
    model = world.model(call.tenant, request.model_id)

    def load() -> dict[str, str]:
        # Looked for when its turn comes: the save before it may not have run yet.
        try:
            source = _source(world, call, request)
        except Refusal as refusal:
            raise WorkFailed(refusal.detail) from None
        return _load(world, model, source, request.optimizer)

    return world.enqueue(call, model, request.seq_id, load)


def _source(world: World, call: Call, request: types.LoadWeightsRequest) -> Checkpoint:
    source = world.checkpoint(call.tenant, request.path, request.weights_access_token)
    if source.path.segment != "weights":
        raise Refusal(400, f"{request.path} is no training checkpoint and cannot be loaded")
    return source


def _create_by_load(world: World, call: Call, request: types.LoadWeightsRequest) -> Answer:
    source = _source(world, call, request)
    if request.session_id is None or request.model_seq_id is None:
        raise Refusal(422, "load_weights needs model_id, or session_id and model_seq_id")
    session = world.session(call.tenant, request.session_id)
    key = ("model", session.session_id, request.model_seq_id)
    job = world.promises.same(key)
    if job is None:
        model = add_model(
            world, session, request.model_seq_id, source.recipe, request.user_metadata
        )
        job = world.promises.make(call.tenant, call.endpoint, key)
        world.start(job, lambda: _load(world, model, source, request.optimizer))
    return world.promise(job, model_id_of(session, request.model_seq_id))


def _load(world: World, model: Model, source: Checkpoint, with_optimizer: bool) -> dict[str, str]:
    if source.recipe.base_model != model.recipe.base_model:
        raise WorkFailed(
            f"{source.path} is of {source.recipe.base_model}, not of {model.recipe.base_model}"
        )
    model.trainer.load(source.model, source.moments if with_optimizer else None)
    _note(world, model.tenant, "checkpoint_read", source)
    return {"path": str(source.path), "model_id": model.model_id, "type": "load_weights"}


def weights_info(world: World, call: Call) -> Answer:
    """Say what one must know to load a checkpoint."""
    request = world.read(call, WeightsInfoRequest)
    recipe = world.checkpoint(call.tenant, request.tinker_path).recipe
    return json_answer(
        {
            "base_model": recipe.base_model,
            "is_lora": True,
            "lora_rank": recipe.rank,
            "train_unembed": recipe.train_unembed,
            "train_mlp": recipe.train_mlp,
            "train_attn": recipe.train_attn,
            "optimizer_config": recipe.optimizer_config,
        }
    )


def copy_weights(world: World, call: Call) -> Answer:
    """Copy a checkpoint into a run of one's own; the idempotency key makes it happen once."""
    request = world.read(call, types.CopyWeightsRequest)
    token = call.headers.get("x-tinker-weights-access-token") or request.weights_access_token
    source = world.checkpoint(call.tenant, request.source_path, token)
    run_id = new_id()
    if request.session_id is not None:
        session = world.session(call.tenant, request.session_id)
        run_id = model_id_of(session, request.model_seq_id or 0)
    copy = Checkpoint(
        path=source.path._replace(run_id=run_id),
        tenant=call.tenant,
        recipe=source.recipe,
        model=source.model,
        moments=source.moments,
        user_metadata=source.user_metadata,
    )
    copy.set_ttl(request.ttl_seconds)
    world.vault.add(copy)
    _note(world, call.tenant, "checkpoint_copied", copy)
    return json_answer({"tinker_path": str(copy.path)})


def _named(world: World, call: Call) -> Checkpoint:
    ids = call.ids
    return world.own_checkpoint(call.tenant, ids["training_run_id"], ids["checkpoint_id"])


def delete_checkpoint(world: World, call: Call) -> Answer:
    """Delete a checkpoint."""
    checkpoint = _named(world, call)
    world.vault.remove(checkpoint)
    _note(world, call.tenant, "checkpoint_deleted", checkpoint)
    return json_answer({})


def publish(world: World, call: Call) -> Answer:
    """Let everybody read a checkpoint; 409 if everybody may."""
    return _publish(world, call, True)


def unpublish(world: World, call: Call) -> Answer:
    """Keep a checkpoint to its owner again; 409 if it is."""
    return _publish(world, call, False)


def _publish(world: World, call: Call, is_public: bool) -> Answer:
    checkpoint = _named(world, call)
    if checkpoint.is_public is is_public:
        raise Refusal(409, f"{checkpoint.path} is {'' if is_public else 'not '}public already")
    checkpoint.is_public = is_public
    event = "checkpoint_published" if is_public else "checkpoint_unpublished"
    _note(world, call.tenant, event, checkpoint)
    return json_answer({})


def set_ttl(world: World, call: Call) -> Answer:
    """Set or remove a checkpoint's time to live."""
    request = world.read(call, TtlRequest)
    checkpoint = _named(world, call)
    checkpoint.set_ttl(request.ttl_seconds)
    _note(world, call.tenant, "checkpoint_ttl_set", checkpoint)
    return json_answer({})


def external_weights_urls(world: World, call: Call) -> Answer:
    """Give a URL per file of an exported checkpoint."""
    checkpoint = _named(world, call)
    if checkpoint.path.segment != "external_weights":
        raise Refusal(400, f"{checkpoint.path} is no external checkpoint and has no files")
    expires = clock.utc_now() + timedelta(hours=1)
    return json_answer({"urls": file_urls(world.url, checkpoint), "expires": expires})


def archive(world: World, call: Call) -> Answer:
    """Give the URL of a checkpoint's tar, or go there, as older clients expect."""
    url = archive_url(world.url, _named(world, call))
    if world.dialect.archive_redirects:
        return Answer(302, b"{}", [JSON_TYPE, (b"location", url.encode())])
    return json_answer({"url": url, "expires": clock.utc_now() + timedelta(hours=1)})


ROUTES: dict[str, Handler] = {
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "load_weights": load_weights,
    "weights_info": weights_info,
    "copy_weights": once_per_key(copy_weights),
    "delete_checkpoint": delete_checkpoint,
    "publish_checkpoint": publish,
    "unpublish_checkpoint": unpublish,
    "set_checkpoint_ttl": set_ttl,
    "external_weights_urls": external_weights_urls,
    "checkpoint_archive": archive,
}
