"""OpenAI's list of models: base models, and the caller's checkpoints and aliases."""

from __future__ import annotations

import msgspec

from tinkex import clock
from tinkex.server.http.request_context import RawResponse, Services
from tinkex.server.http.store_access import read
from tinkex.server.inference.error_bodies import ApiFamily, invalid_value
from tinkex.server.inference.inference_call import InferenceCall, InferenceRoute
from tinkex.server.inference.model_names import ModelSource, find_source, list_sampleable
from tinkex.store import aliases, checkpoints
from tinkex.store.database import Connection

MAX_LIMIT = 1000
DEFAULT_LIMIT = 200
OWNER = "tinkex"
PUBLIC = "public"


def parse_limit(call: InferenceCall[object], default: int = DEFAULT_LIMIT) -> int:
    """Return the maximum number of models of a list."""
    text = call.query.get("limit", str(default))
    is_number = len(text) < 20 and text.isascii() and text.isdecimal()
    if not is_number or not 1 <= int(text) <= MAX_LIMIT:
        raise invalid_value("limit", f"limit is {text[:80]!r}; expected 1 to {MAX_LIMIT}")
    return int(text)


async def list_models(services: Services, call: InferenceCall[None]) -> RawResponse:
    """List base models, the caller's sampler checkpoints, newest first, and their aliases."""
    limit = parse_limit(call)
    models = await read(services, lambda db: list_entries(db, call.tenant_id, limit))
    return RawResponse(body=msgspec.json.encode({"object": "list", "data": models}))


def list_entries(db: Connection, tenant_id: str, limit: int) -> list[dict[str, object]]:
    """Return descriptions of the models that a tenant can use."""
    now = clock.now()
    bases = {model.name: model for model in list_sampleable(db)}
    saved = checkpoints.list_samplers(db, tenant_id, now, limit=limit)
    named = aliases.list_all(db, tenant_id, now)
    sources = [
        *(ModelSource(requested=name, base=base) for name, base in bases.items()),
        *(
            ModelSource(requested=name, base=bases[checkpoint.base_model], checkpoint=checkpoint)
            for name, checkpoint in [*((str(each.path), each) for each in saved), *named]
            if checkpoint.base_model in bases
        ),
    ]
    return [_describe(source, tenant_id) for source in sources[:limit]]


def _describe(source: ModelSource, tenant_id: str) -> dict[str, object]:
    checkpoint = source.checkpoint
    owner = OWNER
    if checkpoint is not None:
        # The names of other tenants are not for everyone.
        owner = tenant_id if checkpoint.tenant_id == tenant_id else PUBLIC
    return {
        "id": source.requested,
        "object": "model",
        "created": 0 if checkpoint is None else int(clock.to_wall_time(checkpoint.created_at)),
        "owned_by": owner,
        "root": source.base.name if checkpoint is None else str(checkpoint.path),
        "parent": None if checkpoint is None else source.base.name,
        "max_model_len": source.base.max_context_tokens,
    }


async def get_model(services: Services, call: InferenceCall[None]) -> RawResponse:
    """Describe one model by any of its names."""
    entry = await read(services, lambda db: find_entry(db, call.tenant_id, call.model_id))
    return RawResponse(body=msgspec.json.encode(entry))


def find_entry(db: Connection, tenant_id: str, name: str) -> dict[str, object]:
    """Return the description of a model; raises 404 for unknown and foreign names."""
    return _describe(find_source(db, tenant_id, name), tenant_id)


ROUTES = (
    InferenceRoute(
        name="models",
        method="GET",
        path="/models",
        family=ApiFamily.OPENAI,
        handler=list_models,
    ),
    InferenceRoute(
        name="model",
        method="GET",
        path="/models/{model}",
        family=ApiFamily.OPENAI,
        handler=get_model,
    ),
)
