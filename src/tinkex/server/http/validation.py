"""Validation of requests: fields, query strings and the limits of base models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import TypedDict
from urllib.parse import parse_qsl

from tinkex import types
from tinkex.engine.examples import check_custom_shapes, parse_examples
from tinkex.engine.losses import CUSTOM
from tinkex.engine.protocol import BaseModel
from tinkex.engine.sampling.request import DEFAULT_MAX_TOKENS, ModelLimits, parse_sample_request
from tinkex.errors import InvalidInput, UnprocessableEntityError
from tinkex.ids import check_id
from tinkex.server.http.request_context import RequestContext, Services, run_in_thread
from tinkex.wire.codec import encode_json

#: The largest integer that both databases store.
MAX_INT64 = 2**63 - 1
MAX_PROJECT_CHARS = 255
#: Maximum length of a display name or version.
MAX_LABEL_CHARS = 1024
MAX_TAGS_BYTES = 16 * 1024
#: Requests with more tokens than this are checked in a thread.
MAX_INLINE_TOKENS = 4096


def check_number(
    name: str, value: int | None, minimum: int = 0, maximum: int = MAX_INT64
) -> int | None:
    """Return a number if it is within bounds; None stays None."""
    if value is not None and not minimum <= value <= maximum:
        raise UnprocessableEntityError(f"{name} is {value}; expected {minimum} to {maximum}")
    return value


def check_label(name: str, text: str | None) -> str | None:
    """Return a display name or version if it is not too long."""
    if text is not None:
        check_number(f"the length of {name}", len(text), maximum=MAX_LABEL_CHARS)
    return text


def check_tags(tags: Sequence[str]) -> list[str]:
    """Return the tags of a session if they are not too large."""
    check_number("the size of tags in bytes", len(encode_json(tags)), maximum=MAX_TAGS_BYTES)
    return list(tags)


def check_project(project_id: str) -> str:
    """Return a project id if it is valid, so that lists can be filtered by it."""
    check_id("project id", project_id)
    check_number("the length of project_id", len(project_id), maximum=MAX_PROJECT_CHARS)
    return project_id


def parse_page(context: RequestContext[object], default_limit: int) -> tuple[int, int]:
    """The limit and offset of a list request; `parse_query` has validated them."""
    return int(context.query.get("limit", default_limit)), int(context.query.get("offset", 0))


MAX_LIMIT = 1000


class QuerySchema(TypedDict, total=False):
    """The keywords of JSON Schema that query parameters use."""

    type: str
    minimum: int
    maximum: int
    enum: list[str]
    format: str
    minLength: int
    maxLength: int
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """A query parameter with its JSON schema and description."""

    schema: QuerySchema
    description: str

    def find_problem(self, text: str) -> str | None:
        """Return what is wrong with a value, or None."""
        return _find_problem(self.schema, text)


QUERY_PARAMETERS: Mapping[str, QueryParameter] = {
    "limit": QueryParameter(
        schema={"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
        description="Maximum number of items.",
    ),
    "offset": QueryParameter(
        schema={"type": "integer", "minimum": 0, "maximum": MAX_INT64},
        description="Number of items to skip.",
    ),
    "after": QueryParameter(
        schema={"type": "integer", "minimum": 0, "maximum": MAX_INT64},
        description="List items after this cursor; 0 starts at the beginning.",
    ),
    "base_model": QueryParameter(
        schema={"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[^\s?#%]+$"},
        description="The name of the base model.",
    ),
    "digest": QueryParameter(
        schema={"type": "string", "minLength": 64, "maxLength": 64, "pattern": r"^[0-9a-f]+$"},
        description="The digest from a response without files; then the response has the files.",
    ),
    "access_scope": QueryParameter(
        schema={"type": "string", "enum": ["owned", "accessible"]},
        description="Only the caller's resources, or also those that others have published.",
    ),
    "project_id": QueryParameter(
        schema={"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\w.:@~+=-]+$"},
        description="Only items of this project.",
    ),
    "search": QueryParameter(
        schema={"type": "string", "minLength": 1, "maxLength": 120, "pattern": r"^[^\x00-\x1f]+$"},
        description="Only runs whose id starts with this text or whose name contains it.",
    ),
    "event_type": QueryParameter(
        schema={
            "type": "string",
            "enum": ["all", "checkpoints", "projects", "teams", "organizations"],
        },
        description="The kind of events to list.",
    ),
    "day": QueryParameter(
        schema={"type": "string", "format": "date"}, description="Only events on this day."
    ),
    "starting_on": QueryParameter(
        schema={"type": "string", "format": "date-time"}, description="The first hour, on the hour."
    ),
    "ending_before": QueryParameter(
        schema={"type": "string", "format": "date-time"}, description="The hour after the last one."
    ),
}


def parse_query(raw: bytes, allowed: frozenset[str]) -> dict[str, str]:
    """Parse and validate a query string; values stay text."""
    if not raw:
        return {}
    query: dict[str, str] = {}
    for name, text in _parse_pairs(raw):
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise UnprocessableEntityError(f"unknown query parameter {name[:80]!r}; known: {known}")
        if name in query:
            raise UnprocessableEntityError(f"query parameter {name!r} is given twice")
        problem = QUERY_PARAMETERS[name].find_problem(text)
        if problem is not None:
            raise UnprocessableEntityError(f"{name} is {text[:80]!r}; {problem}")
        query[name] = text
    return query


def _parse_pairs(raw: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64
        )
    except ValueError:
        raise UnprocessableEntityError("the query string is invalid") from None


def _find_problem(schema: QuerySchema, text: str) -> str | None:
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return None
        return f"expected an integer from {low} to {high}"
    if "enum" in schema:
        return None if text in schema["enum"] else f"expected one of {', '.join(schema['enum'])}"
    if schema.get("format") == "date":
        return None if _is_date(text) else "expected a day such as 2026-01-31"
    if schema.get("format") == "date-time":
        return None if _is_datetime(text) else "expected a time such as 2026-01-31T13:00:00Z"
    return _find_text_problem(schema, text)


def _find_text_problem(schema: QuerySchema, text: str) -> str | None:
    low, high = schema["minLength"], schema["maxLength"]
    if not low <= len(text) <= high:
        return f"expected {low} to {high} characters"
    if not re.search(schema["pattern"], text):
        return "it contains an invalid character"
    return None


def _is_date(text: str) -> bool:
    try:
        return len(text) == len("2026-01-31") and date.fromisoformat(text) is not None
    except ValueError:
        return False


def _is_datetime(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


# --- limits of base models ---------------------------------------------------------------------
# What can be checked without weights, before a job is queued; the engine checks again.


async def check_pass(
    services: Services, batch: types.ForwardBackwardInput, model: BaseModel | None
) -> int:
    """Return the number of tokens of a pass; raises InvalidInput if it exceeds a limit."""
    num_tokens = sum(datum.model_input.length for datum in batch.data)
    limit = services.config.max_request_tokens
    if num_tokens > limit:
        raise InvalidInput(
            f"the request has {num_tokens} tokens; the limit of one training request is {limit}; "
            "split the batch, or ask the operator to raise max_request_tokens"
        )
    is_custom = batch.loss_fn == CUSTOM
    if is_custom:
        check_custom_losses(services)
    if model is not None:
        # An uploaded loss may take long even for a few tokens.
        num_checked = MAX_INLINE_TOKENS + 1 if is_custom else num_tokens
        await _run_check(num_checked, lambda: _validate_pass(batch, model))
    return num_tokens


def check_custom_losses(services: Services) -> None:
    """Raise InvalidInput if this server does not compute uploaded losses."""
    if not services.config.custom_losses:
        raise InvalidInput(
            "this server does not compute uploaded losses; pass the function itself to "
            "forward_backward_custom, which computes it in the client, or ask the operator to set "
            "custom_losses"
        )


def _validate_pass(batch: types.ForwardBackwardInput, model: BaseModel) -> None:
    examples = parse_examples(
        batch, vocab_size=_vocab_size(model), max_context_tokens=model.max_context_tokens
    )
    if batch.loss_fn == CUSTOM:
        check_custom_shapes(batch, examples)


async def check_sample(request: types.SampleRequest, model: BaseModel | None) -> int:
    """Return the maximum number of tokens of a sample request; raises InvalidInput."""
    num_prompt = request.prompt.length
    if model is not None:
        await _run_check(num_prompt, lambda: _validate_sample(request, model))
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    return num_prompt + request.num_samples * max_tokens


def _validate_sample(request: types.SampleRequest, model: BaseModel) -> None:
    limits = ModelLimits(
        vocab_size=_vocab_size(model),
        max_context_tokens=model.max_context_tokens,
        eos_tokens=frozenset(),
        # Only the engine knows whether the model has a tokenizer.
        has_tokenizer=True,
    )
    parse_sample_request(request, limits)


def _vocab_size(model: BaseModel) -> int:
    """The vocabulary size; if it is unknown, any token id is accepted."""
    return model.vocab_size or 1 << 31


async def _run_check(num_tokens: int, check: Callable[[], None]) -> None:
    if num_tokens > MAX_INLINE_TOKENS:
        await run_in_thread(check)
    else:
        check()
