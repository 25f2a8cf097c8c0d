"""Anthropic's list of models, in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from tinkex.server.http.request_context import RawResponse, Services
from tinkex.server.http.store_access import read
from tinkex.server.inference.error_bodies import ApiFamily, invalid_value
from tinkex.server.inference.inference_call import InferenceCall, InferenceRoute
from tinkex.server.inference.openai_models import (
    MAX_LIMIT,
    find_entry,
    list_entries,
    parse_limit,
)

DEFAULT_LIMIT = 20


async def list_models(services: Services, call: InferenceCall[None]) -> RawResponse:
    """List base models, then the caller's sampler checkpoints, newest first."""
    limit = parse_limit(call, DEFAULT_LIMIT)
    entries = await read(services, lambda db: list_entries(db, call.tenant_id, MAX_LIMIT))
    models = [_to_model(entry) for entry in entries]
    page = select_page(models, limit, call.query.get("after_id"), call.query.get("before_id"))
    return RawResponse(body=msgspec.json.encode(page))


async def get_model(services: Services, call: InferenceCall[None]) -> RawResponse:
    """Describe one model by any of its names."""
    entry = await read(services, lambda db: find_entry(db, call.tenant_id, call.model_id))
    return RawResponse(body=msgspec.json.encode(_to_model(entry)))


def _to_model(entry: Mapping[str, Any]) -> dict[str, object]:
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        # Like a release date that is unknown, the epoch stands for that of a base model.
        "created_at": datetime.fromtimestamp(entry["created"], UTC),
        "lifecycle": "active",
        "max_input_tokens": entry["max_model_len"],
    }


def select_page(
    models: Sequence[Mapping[str, object]],
    limit: int,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, object]:
    """Return the models after or before another one; `has_more` looks in the same direction."""
    if after_id and before_id:
        raise invalid_value("before_id", "after_id and before_id cannot be combined; send one")
    ids = [model["id"] for model in models]
    if before_id:
        end = _find_id("before_id", ids, before_id)
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = _find_id("after_id", ids, after_id) + 1 if after_id else 0
        end = min(start + limit, len(ids))
        has_more = end < len(ids)
    page = models[start:end]
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _find_id(param: str, ids: Sequence[object], wanted: str) -> int:
    if wanted not in ids:
        raise invalid_value(param, f"{param}: {wanted!r:.300} is not in the list of models")
    return ids.index(wanted)


ROUTES = (
    InferenceRoute(
        name="models",
        method="GET",
        path="/models",
        family=ApiFamily.ANTHROPIC,
        handler=list_models,
    ),
    InferenceRoute(
        name="model",
        method="GET",
        path="/models/{model}",
        family=ApiFamily.ANTHROPIC,
        handler=get_model,
    ),
)
