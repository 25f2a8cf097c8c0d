"""Model names of requests: which base model and checkpoint they mean."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex import clock
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput, NotFoundError, StoreUnavailable
from tinkex.ids import SCHEME, TinkerPath, parse_tinker_path
from tinkex.server.http.model_specs import find_model, list_served_models
from tinkex.server.http.ownership import require_readable_checkpoint
from tinkex.server.http.request_context import Services
from tinkex.server.http.store_access import read
from tinkex.server.inference.error_bodies import invalid_value, model_not_found
from tinkex.store.database import Connection

MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a request samples from."""

    requested: str
    """The name in the request, which responses repeat."""
    base: BaseModel
    path: TinkerPath | None = None
    """The checkpoint; None for the base model itself."""

    def check_readable(self, db: Connection, tenant_id: str) -> None:
        """Raise if the checkpoint was deleted or unpublished since the name was resolved."""
        if self.path is not None:
            try:
                require_readable_checkpoint(db, {tenant_id}, self.path, clock.now())
            except NotFoundError:
                raise model_not_found(self.requested) from None


async def resolve_model(services: Services, tenant_id: str, name: str) -> ModelSource:
    """Find what a name means to a tenant; raises 404 for unknown and foreign names."""
    if not name or len(name) > MAX_NAME_CHARS:
        raise invalid_value("model", f"model must have 1 to {MAX_NAME_CHARS} characters")
    async with services.tenant_slots.semaphore_for(tenant_id):
        return await read(services, lambda db: find_source(db, tenant_id, name))


def find_source(db: Connection, tenant_id: str, name: str) -> ModelSource:
    """Find what a name means; raises InferenceError."""
    served = [model for model in list_served_models(db) if model.is_sampleable]
    if not served:
        raise StoreUnavailable("the server is starting and serves no base model yet; try again")
    base = find_model(served, name)
    if base is not None:
        return ModelSource(requested=name, base=base)
    if not name.startswith(SCHEME):
        raise model_not_found(name)
    try:
        path = parse_tinker_path(name)
        checkpoint = require_readable_checkpoint(db, {tenant_id}, path, clock.now())
    except (InvalidInput, NotFoundError):
        raise model_not_found(name) from None
    if path.segment == "external_weights":
        raise invalid_value("model", f"{path} is for other tools; use sampler_weights or weights")
    base = find_model(served, checkpoint.base_model)
    if base is None:
        raise invalid_value(
            "model", f"the base model {checkpoint.base_model} of {path} is not served"
        )
    return ModelSource(requested=name, base=base, path=path)
