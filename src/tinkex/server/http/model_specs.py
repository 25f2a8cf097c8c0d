"""Base models that the worker serves, and adapter specs of new and loaded models."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from tinkex import clock, types
from tinkex.engine.models.sources import unknown_model_message
from tinkex.engine.protocol import DEFAULT_ALPHA, AdapterSpec, BaseModel
from tinkex.errors import APIStatusError, BadRequestError, StoreUnavailable
from tinkex.ids import PATH_SHAPE, looks_like_checkpoint
from tinkex.server.http.request_context import Services
from tinkex.server.http.store_access import read
from tinkex.server.http.validation import MAX_INT64, check_number
from tinkex.store import groups, runs
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord, RunState, SessionRecord
from tinkex.types.base import encode_hook, preload_type


def list_served_models(db: Connection) -> list[BaseModel]:
    """All base models that a group serves; empty until the first worker has started."""
    models = [model for group in groups.list_current(db) for model in group.base_models]
    # A model that some groups train and others only sample from is trainable.
    models.sort(key=lambda model: bool(model.get("is_trainable", True)))
    described = {model["name"]: model for model in models}
    return msgspec.convert(list(described.values()), preload_type(list[BaseModel]), strict=False)


def find_model(models: Sequence[BaseModel], name: str) -> BaseModel | None:
    """Find a base model by name."""
    return next((model for model in models if model.name == name), None)


async def find_base_model(
    services: Services, owner: tuple[str, str], find: Callable[[Connection], str]
) -> BaseModel | None:
    """The base model of a run or a sampling session; None if it is unknown.

    `owner` is the tenant and the id; `find` looks up the name of the base model. If it raises, the
    request is not checked here: a repeated request gets its first response, and a new one fails
    when it is stored.
    """
    cached = services.cache.base_models.get(owner)
    if cached is not None:
        return cached
    try:
        model = await read(services, lambda db: find_model(list_served_models(db), find(db)))
    except APIStatusError:
        return None
    if model is not None:
        services.cache.base_models.put(owner, model)
    return model


def require_trainable_model(db: Connection, name: str) -> BaseModel:
    """Return a trainable base model; raises BadRequestError that lists the trainable ones."""
    return _require_model(db, name, lambda model: model.is_trainable, "trained")


def require_sampleable_model(db: Connection, name: str) -> BaseModel:
    """Return a sampleable base model; raises BadRequestError that lists the sampleable ones."""
    return _require_model(db, name, lambda model: model.is_sampleable, "sampled")


def _require_model(
    db: Connection, name: str, is_usable: Callable[[BaseModel], bool], verb: str
) -> BaseModel:
    if not groups.list_current(db):
        raise StoreUnavailable("the server is starting and serves no base model yet; try again")
    usable = [model for model in list_served_models(db) if is_usable(model)]
    model = find_model(usable, name)
    if model is None:
        hint = ""
        if looks_like_checkpoint(name):
            hint = f"; it looks like saved weights, whose path is {PATH_SHAPE}"
        raise BadRequestError(
            unknown_model_message(name, [model.name for model in usable], verb) + hint
        )
    return model


MAX_RANK = 512
DEFAULT_RANK = 32
OPTIMIZERS = ("adamw", "dimuon")
_MAX_SEED = 2**31


def spec_for_create(request: types.CreateModelRequest, gradient_shards: int) -> AdapterSpec:
    """The adapter spec of a create request; defaults and a random seed are fixed now."""
    lora = request.lora_config or types.LoraConfig(rank=DEFAULT_RANK)
    check_number("lora_config.rank", lora.rank, minimum=1, maximum=MAX_RANK)
    check_number("lora_config.seed", lora.seed, minimum=-MAX_INT64)
    return AdapterSpec(
        base_model=request.base_model,
        rank=lora.rank,
        # Repeating the job after a crash must give the same weights.
        seed=secrets.randbelow(_MAX_SEED) if lora.seed is None else lora.seed,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        optimizer=optimizer_settings(request.optimizer_config or types.AdamOptimizerConfig()),
        gradient_shards=gradient_shards,
        alpha=lora.alpha or DEFAULT_ALPHA,
        use_rslora=bool(lora.use_rslora),
        target_modules=tuple(lora.target_modules) if lora.target_modules else None,
    )


def spec_for_load(
    request: types.LoadWeightsRequest, source: CheckpointRecord, gradient_shards: int
) -> AdapterSpec:
    """The adapter spec of a checkpoint; its optimizer is used only if its state is loaded."""
    saved = stored_spec(source)
    optimizer = saved.optimizer
    if not request.optimizer:
        optimizer = optimizer_settings(request.optimizer_config or types.AdamOptimizerConfig())
    return replace(
        saved,
        base_model=request.base_model or saved.base_model,
        optimizer=optimizer,
        gradient_shards=gradient_shards,
    )


def lora_options(spec: AdapterSpec) -> dict[str, object]:
    """The options of a spec that official clients do not know, as far as they are set."""
    options = {
        "alpha": spec.alpha if spec.alpha != DEFAULT_ALPHA else None,
        "use_rslora": spec.use_rslora or None,
        "target_modules": None if spec.target_modules is None else list(spec.target_modules),
    }
    return {name: value for name, value in options.items() if value is not None}


def stored_spec(source: CheckpointRecord | RunRecord) -> AdapterSpec:
    """The stored adapter spec of a model or checkpoint."""
    return msgspec.convert(source.spec, preload_type(AdapterSpec))


def optimizer_settings(config: types.OptimizerConfig) -> dict[str, object]:
    """The type and settings of a supported optimizer; raises BadRequestError for others."""
    settings: dict[str, object] = msgspec.to_builtins(config, enc_hook=encode_hook)
    kind = settings.get("type")
    if kind not in OPTIMIZERS:
        raise BadRequestError(f"unknown optimizer {kind!r:.80}; supported: {', '.join(OPTIMIZERS)}")
    if isinstance(config, types.OptimizerConfigBase):
        raise BadRequestError(
            f"this server does not support these settings of {kind!r}: {settings!r:.200}"
        )
    return settings


def insert_run(
    db: Connection,
    session: SessionRecord,
    run_id: str,
    spec: AdapterSpec,
    user_metadata: Mapping[str, object] | None,
    state: RunState = RunState.CREATING,
    *,
    group_id: str = "",
) -> None:
    """Insert a new model; raises BadRequestError if its id is taken."""
    if runs.find(db, run_id) is not None:
        raise BadRequestError(f"model {run_id!r} already exists; use another model_seq_id")
    now = clock.now()
    run = RunRecord(
        id=run_id,
        tenant_id=session.tenant_id,
        session_id=session.id,
        base_model=spec.base_model,
        spec=msgspec.to_builtins(spec),
        user_metadata=None if user_metadata is None else dict(user_metadata),
        state=state,
        created_at=now,
        used_at=now,
        group_id=group_id,
    )
    runs.insert(db, run)
