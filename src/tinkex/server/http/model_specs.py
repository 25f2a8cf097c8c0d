"""Which base models the worker serves, as it said when it started."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tinkex import clock, types
from tinkex.engine.models.sources import unknown_model_message
from tinkex.engine.protocol import AdapterSpec, BaseModel
from tinkex.errors import BadRequestError, StoreUnavailable
from tinkex.ids import PATH_SHAPE, looks_like_checkpoint
from tinkex.jobs.served_models import BASE_MODELS_SETTING
from tinkex.server.http.validation import MAX_INT64, check_number
from tinkex.store import runs, settings
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord, RunState, SessionRecord
from tinkex.types.base import encode_hook, preload_type


def list_served_models(db: Connection) -> list[BaseModel]:
    """All base models; none until the first worker has started."""
    found: Any = settings.get(db, BASE_MODELS_SETTING) or []
    return msgspec.convert(found, preload_type(list[BaseModel]), strict=False)


def find_model(models: Sequence[BaseModel], name: str) -> BaseModel | None:
    """A base model by name."""
    return next((model for model in models if model.name == name), None)


def require_trainable_model(db: Connection, name: str) -> BaseModel:
    """A base model that can be trained, or a sentence that names those that can."""
    return _require_model(db, name, lambda model: model.is_trainable, "trained")


def require_sampleable_model(db: Connection, name: str) -> BaseModel:
    """A base model that can be sampled, or a sentence that names those that can."""
    return _require_model(db, name, lambda model: model.is_sampleable, "sampled")


def _require_model(db: Connection, name: str, is_usable: Any, verb: str) -> BaseModel:
    if settings.get(db, BASE_MODELS_SETTING) is None:
        raise StoreUnavailable("the server is starting and serves no base model yet; try again")
    fit = [model for model in list_served_models(db) if is_usable(model)]
    found = find_model(fit, name)
    if found is None:
        hint = ""
        if looks_like_checkpoint(name):
            hint = f"; it looks like saved weights, whose path is {PATH_SHAPE}"
        raise BadRequestError(
            unknown_model_message(name, [model.name for model in fit], verb) + hint
        )
    return found


MAX_RANK = 512
DEFAULT_RANK = 32
OPTIMIZERS = ("adamw", "dimuon")
_MAX_SEED = 2**31


def spec_for_create(request: types.CreateModelRequest) -> AdapterSpec:
    """What a client asks for; what it left open is chosen now, for good."""
    lora = request.lora_config or types.LoraConfig(rank=DEFAULT_RANK)
    check_number("lora_config.rank", lora.rank, minimum=1, maximum=MAX_RANK)
    check_number("lora_config.seed", lora.seed, minimum=-MAX_INT64)
    return AdapterSpec(
        base_model=request.base_model,
        rank=lora.rank,
        # Doing the work again after a crash must give the same weights.
        seed=secrets.randbelow(_MAX_SEED) if lora.seed is None else lora.seed,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        optimizer=optimizer_settings(request.optimizer_config or types.AdamOptimizerConfig()),
    )


def spec_for_load(request: types.LoadWeightsRequest, source: CheckpointRecord) -> AdapterSpec:
    """What a checkpoint needs; its optimizer goes along only if its state does."""
    saved = stored_spec(source)
    optimizer = saved.optimizer
    if not request.optimizer:
        optimizer = optimizer_settings(request.optimizer_config or types.AdamOptimizerConfig())
    return replace(saved, base_model=request.base_model or saved.base_model, optimizer=optimizer)


def stored_spec(source: CheckpointRecord | RunRecord) -> AdapterSpec:
    """How the adapter of a model or checkpoint was made."""
    return msgspec.convert(source.spec, preload_type(AdapterSpec))


def optimizer_settings(config: types.OptimizerConfig) -> dict[str, Any]:
    """An optimizer's type and settings, if it is one that can be used here."""
    settings: dict[str, Any] = msgspec.to_builtins(config, enc_hook=encode_hook)
    kind = settings.get("type")
    if kind not in OPTIMIZERS:
        raise BadRequestError(
            f"optimizer {kind!r:.80} is not known here; there is: {', '.join(OPTIMIZERS)}"
        )
    return settings


def insert_run(
    db: Connection,
    session: SessionRecord,
    run_id: str,
    spec: AdapterSpec,
    user_metadata: Mapping[str, Any] | None,
    state: RunState = RunState.CREATING,
) -> None:
    """Enter a new model; its number must not have been used in its session."""
    if runs.find(db, run_id) is not None:
        raise BadRequestError(f"model {run_id!r} exists already; use another model_seq_id")
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
    )
    runs.insert(db, run)
