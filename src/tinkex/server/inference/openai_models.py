"""OpenAI's list of models: base models, and the caller's checkpoints and aliases."""

from __future__ import annotations

import msgspec

from tinkex import clock
from tinkex.server.http.model_specs import list_served_models
from tinkex.server.http.request_context import RawResponse, Services
from tinkex.server.http.store_access import read
from tinkex.server.inference.error_bodies import ApiFamily, invalid_value
from tinkex.server.inference.inference_call import InferenceCall, InferenceRoute
from tinkex.server.inference.model_names import find_source
from tinkex.store import checkpoints
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord

MAX_LIMIT = 1000
DEFAULT_LIMIT = 200
OWNER = "tinkex"


def parse_limit(call: InferenceCall[object], default: int = DEFAULT_LIMIT) -> int:
    """Return the maximum number of models of a list."""
    text = call.query.get("limit", str(default))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise invalid_value("limit", f"limit is {text[:80]!r}; expected 1 to {MAX_LIMIT}")
    return int(text)


async def list_models(services: Services, call: InferenceCall[None]) -> RawResponse:
    """List base models, then the caller's sampler checkpoints, newest first."""
    limit = parse_limit(call)
    models = await read(services, lambda db: list_entries(db, call.tenant_id, limit))
    return RawResponse(body=msgspec.json.encode({"object": "list", "data": models}))


def list_entries(db: Connection, tenant_id: str, limit: int) -> list[dict[str, object]]:
    """Return the first models of a tenant in OpenAI's form."""
    bases = [model for model in list_served_models(db) if model.is_sampleable]
    context = {model.name: model.max_context_tokens for model in bases}
    entries = [
        _entry(model.name, max_model_len=model.max_context_tokens, root=model.name)
        for model in bases
    ]
    saved, _ = checkpoints.list_page(db, tenant_id, limit=MAX_LIMIT, offset=0, now=clock.now())
    entries += [
        _checkpoint_entry(checkpoint, context[checkpoint.base_model])
        for checkpoint in saved
        if checkpoint.segment == "sampler_weights" and checkpoint.base_model in context
    ]
    return entries[:limit]


def _checkpoint_entry(checkpoint: CheckpointRecord, max_context_tokens: int) -> dict[str, object]:
    path = str(checkpoint.path)
    return _entry(
        path,
        created=int(checkpoint.created_at),
        owned_by=checkpoint.tenant_id,
        root=path,
        parent=checkpoint.base_model,
        max_model_len=max_context_tokens,
    )


def _entry(model_id: str, **fields: object) -> dict[str, object]:
    return {
        "id": model_id,
        "object": "model",
        "created": 0,
        "owned_by": OWNER,
        "root": None,
        "parent": None,
        "max_model_len": None,
        **fields,
    }


async def get_model(services: Services, call: InferenceCall[None]) -> RawResponse:
    """Describe one model by any of its names."""
    entry = await read(services, lambda db: find_entry(db, call.tenant_id, call.model_id))
    return RawResponse(body=msgspec.json.encode(entry))


def find_entry(db: Connection, tenant_id: str, name: str) -> dict[str, object]:
    """Return a model in OpenAI's form; raises 404 for unknown and foreign names."""
    source = find_source(db, tenant_id, name)
    return _entry(
        name,
        owned_by=OWNER if source.path is None else tenant_id,
        root=source.base.name if source.path is None else str(source.path),
        parent=None if source.path is None else source.base.name,
        max_model_len=source.base.max_context_tokens,
    )


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
