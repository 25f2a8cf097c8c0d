"""Which base models the worker serves, as it said when it started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tinkex.engine.models.sources import unknown_model_message
from tinkex.engine.protocol import BaseModel
from tinkex.errors import BadRequestError, StoreUnavailable
from tinkex.ids import PATH_SHAPE, looks_like_checkpoint
from tinkex.jobs.serving import BASE_MODELS_SETTING
from tinkex.store import settings
from tinkex.store.database import Connection
from tinkex.types.base import preload_type


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
