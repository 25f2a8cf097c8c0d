"""Model names of requests: which base model and checkpoint they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex import clock
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InvalidInput, StoreUnavailable
from tinkex.ids import SAMPLER_SEGMENT, SCHEME, TinkerPath, parse_tinker_path
from tinkex.server.http.model_specs import find_model, list_served_models
from tinkex.server.http.request_context import Services
from tinkex.server.http.store_access import read
from tinkex.server.inference.error_bodies import invalid_value, model_not_found
from tinkex.store import aliases, checkpoints
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord

MAX_NAME_CHARS = 1024
_LATEST = "@latest"
#: The context length that hosted Tinker appends to names of base models.
_PEFT_SUFFIX = re.compile(r":peft:\w+$")
#: Checkpoints that an ambiguous name lists.
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a request samples from."""

    requested: str
    """The name in the request, which responses repeat."""
    base: BaseModel
    checkpoint: CheckpointRecord | None = None
    """None for the base model itself."""

    @property
    def path(self) -> TinkerPath | None:
        """The path of the checkpoint."""
        return None if self.checkpoint is None else self.checkpoint.path

    def check_readable(self, db: Connection, tenant_id: str) -> None:
        """Raise if the checkpoint was deleted or unpublished since the name was resolved."""
        if self.checkpoint is not None:
            _require_readable(db, tenant_id, self.checkpoint.path, self.requested)


async def resolve_model(services: Services, tenant_id: str, name: str) -> ModelSource:
    """Find what a name means to a tenant; raises 404 for unknown and foreign names."""
    async with services.tenant_slots.semaphore_for(tenant_id):
        return await read(services, lambda db: find_source(db, tenant_id, name))


def find_source(db: Connection, tenant_id: str, name: str) -> ModelSource:
    """Find what a name means; raises InferenceError."""
    if not name or len(name) > MAX_NAME_CHARS:
        raise invalid_value("model", f"model must have 1 to {MAX_NAME_CHARS} characters")
    served = list_sampleable(db)
    base = find_base(served, name)
    if base is not None:
        return ModelSource(requested=name, base=base)
    given_base, separator, rest = name.partition(";")
    checkpoint = _find_checkpoint(db, tenant_id, rest if separator else name, name)
    if checkpoint.path.segment not in {SAMPLER_SEGMENT, "weights"}:
        raise invalid_value(
            "model", f"{checkpoint.path} is for other tools; use sampler_weights or weights"
        )
    if separator and find_base(served, given_base) != find_base(served, checkpoint.base_model):
        raise invalid_value(
            "model",
            f"{checkpoint.path} belongs to base model {checkpoint.base_model}, not to "
            f"{given_base!r:.200}",
        )
    base = find_model(served, checkpoint.base_model)
    if base is None:
        raise invalid_value(
            "model", f"the base model {checkpoint.base_model} of {checkpoint.path} is not served"
        )
    return ModelSource(requested=name, base=base, checkpoint=checkpoint)


def list_sampleable(db: Connection) -> list[BaseModel]:
    """Return the base models that can be sampled; raises 503 while the server starts."""
    served = [model for model in list_served_models(db) if model.is_sampleable]
    if not served:
        raise StoreUnavailable("the server serves no base model yet; try again")
    return served


def find_base(served: Sequence[BaseModel], name: str) -> BaseModel | None:
    """Find a base model by its name, with or without a context length."""
    found = find_model(served, name)
    return found if found is not None else find_model(served, _PEFT_SUFFIX.sub("", name))


def _find_checkpoint(db: Connection, tenant_id: str, name: str, requested: str) -> CheckpointRecord:
    if name.startswith(SCHEME):
        try:
            path = parse_tinker_path(name)
        except InvalidInput:
            raise model_not_found(requested) from None
        return _require_readable(db, tenant_id, path, requested)
    aliased = aliases.find(db, tenant_id, name, clock.now())
    if aliased is not None:
        return _require_readable(db, tenant_id, aliased.path, requested)
    return _find_short(db, tenant_id, name, requested)


def _require_readable(
    db: Connection, tenant_id: str, path: TinkerPath, requested: str
) -> CheckpointRecord:
    checkpoint = checkpoints.find(db, path, clock.now())
    if checkpoint is None or not (checkpoint.is_public or checkpoint.tenant_id == tenant_id):
        raise model_not_found(requested)
    return checkpoint


def _find_short(db: Connection, tenant_id: str, name: str, requested: str) -> CheckpointRecord:
    """Find a sampler checkpoint of the tenant by `<run>@latest`, `<run>/<name>` or `<name>`."""
    if name.endswith(_LATEST):
        run_id, wanted = name.removesuffix(_LATEST), None
    else:
        run_id, _, wanted = name.rpartition("/")
    found = checkpoints.list_samplers(
        db, tenant_id, clock.now(), run_id=run_id or None, name=wanted, limit=_MAX_LISTED
    )
    if not found or (wanted is None and not run_id):
        raise model_not_found(requested)
    if wanted is not None and len(found) > 1:
        paths = ", ".join(str(checkpoint.path) for checkpoint in found)
        raise invalid_value(
            "model", f"several checkpoints are named {wanted!r:.200}; use one of: {paths}"
        )
    return found[0]
