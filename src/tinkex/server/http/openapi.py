"""The OpenAPI 3.1 document, built from the endpoint table.

Litestar does not generate it: endpoint handlers read raw bytes, so Litestar sees no types, and
tensors, open unions, protobuf bodies and query strings would each need a schema plugin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tinkex.ids import TYPE_BY_SEGMENT
from tinkex.server.http.json_schemas import build_schemas, schema_name, schema_ref
from tinkex.server.http.request_context import Handler
from tinkex.server.http.router import PUBLIC_ENDPOINTS
from tinkex.server.http.validation import QUERY_PARAMETERS
from tinkex.wire.endpoints import ENDPOINTS, PREFIX, BodyFormat, Endpoint

JSON = "application/json"
PROTO = "application/x-protobuf"
_BYTES = {"type": "string", "format": "binary"}
_ID = {"type": "string", "minLength": 1, "pattern": r"^[A-Za-z0-9_][A-Za-z0-9._:~@+=-]*$"}
_ERRORS = {
    400: "Bad request: not possible in the current state of the resource.",
    401: "The API key or token is missing, wrong, revoked or expired.",
    404: "The resource does not exist or belongs to another tenant.",
    409: "Conflict: the resource is already in the requested state.",
    410: "Gone: the future has expired or the session has finished.",
    413: "The body exceeds the server's limit.",
    415: "The media type or encoding of the body is not supported.",
    422: "A value is invalid.",
    429: "The tenant has reached a limit; try again later.",
    500: "Internal server error; the server's log has details.",
    503: "The server is overloaded or its store is unavailable; try again later.",
}
_HEADERS = {
    "x-idempotency-key": "A repeated request with the same key returns the first response.",
    "x-tinker-weights-access-token": "A credential of the tenant that owns the weights.",
}
_HEADERS_BY_ENDPOINT = {
    "create_session": ("x-idempotency-key",),
    "copy_weights": ("x-idempotency-key", "x-tinker-weights-access-token"),
}
_EXAMPLES: dict[str, dict[str, object]] = {
    "client_config": {"sdk_version": "0.36.0"},
    "client_dynamic_config": {"sdk_version": "0.36.0"},
    "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"},
    "finish_session": {"reason": {"type": "success"}, "detail": None},
    "retrieve_future": {"request_id": "…", "allow_metadata_only": True},
    "set_checkpoint_ttl": {"ttl_seconds": 86400},
}


def build_document(routes: Mapping[str, Handler], version: str) -> bytes:
    """Build the document of these endpoints, as JSON."""
    rows = [ENDPOINTS[name] for name in routes]
    paths: dict[str, dict[str, object]] = {}
    for row in rows:
        operation = _operation(row, _first_line(routes[row.name]))
        paths.setdefault(document_path(row.path), {})[row.method.lower()] = operation
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "tinkex",
            "version": version,
            "description": "The Tinker API: training, sampling and checkpoints of LoRA adapters.",
        },
        "security": [{"ApiKey": []}, {"Bearer": []}],
        "paths": paths,
        "components": {
            "schemas": build_schemas(_message_types(rows)),
            "responses": {str(status): _error_response(status) for status in _ERRORS},
            "securitySchemes": {
                "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "Bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    return msgspec.json.encode(document)


def document_path(path: str) -> str:
    """The URL path of an endpoint; a checkpoint id consists of two segments."""
    return PREFIX + path.replace("{checkpoint_id}", "{segment}/{name}")


def _first_line(handler: Handler) -> str:
    return (handler.__doc__ or "").partition("\n")[0]


def _message_types(rows: list[Endpoint[object, object]]) -> list[type[object]]:
    return [
        type_
        for row in rows
        for type_ in (row.request, row.reply, row.result_type)
        if type_ is not None
    ]


def _operation(row: Endpoint[object, object], summary: str) -> dict[str, object]:
    operation: dict[str, object] = {
        "operationId": row.name,
        "summary": summary,
        "tags": [row.path.split("/")[1]],
        "parameters": _parameters(row),
        "responses": _responses(row),
    }
    if row.body is not BodyFormat.NONE:
        operation["requestBody"] = _request_body(row)
    if row.result_type is not None:
        name = schema_name(row.result_type)
        operation["description"] = f"Returns a future; retrieve_future returns its {name}."
    if row.is_legacy:
        operation["deprecated"] = True
    if row.name in PUBLIC_ENDPOINTS:
        operation["security"] = []
    return operation


def _parameters(row: Endpoint[object, object]) -> list[dict[str, object]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema(name)}
        for name in re.findall(r"\{(\w+)\}", document_path(row.path))
    ]
    in_query = [
        {
            "name": name,
            "in": "query",
            "description": QUERY_PARAMETERS[name].description,
            "required": name in {"starting_on", "ending_before"},
            "schema": dict(QUERY_PARAMETERS[name].schema),
        }
        for name in sorted(row.query)
    ]
    in_header = [
        {"name": name, "in": "header", "description": _HEADERS[name], "schema": {"type": "string"}}
        for name in _HEADERS_BY_ENDPOINT.get(row.name, ())
    ]
    return in_path + in_query + in_header


def _path_schema(name: str) -> dict[str, object]:
    return {"enum": list(TYPE_BY_SEGMENT)} if name == "segment" else {**_ID, "maxLength": 255}


def _request_body(row: Endpoint[object, object]) -> dict[str, object]:
    json_form: dict[str, object] = {"schema": schema_ref(schema_name(row.request))}
    if row.name in _EXAMPLES:
        json_form["examples"] = {"typical": {"value": _EXAMPLES[row.name]}}
    content: dict[str, object] = {JSON: json_form}
    if row.body is BodyFormat.PROTO:
        content = {PROTO: {"schema": _BYTES}, **content}
    return {
        "description": "May be compressed, with Content-Encoding: zstd.",
        "required": schema_name(row.request) != "Empty",
        "content": content,
    }


def _responses(row: Endpoint[object, object]) -> dict[str, object]:
    statuses = set(_ERRORS)
    if row.name in PUBLIC_ENDPOINTS:
        statuses = {500}
    elif row.body is BodyFormat.NONE:
        statuses -= {413, 415}
    responses: dict[str, object] = {
        "200": {"description": "Success.", "content": _response_content(row)}
    }
    if row.name == "checkpoint_archive":
        responses["302"] = {"description": "Redirect to the archive."}
    if row.is_long_poll:
        pending = {JSON: {"schema": schema_ref("Pending")}}
        responses["408"] = {
            "description": "The result is not ready; poll again.",
            "content": pending,
        }
    for status in sorted(statuses):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


def _response_content(row: Endpoint[object, object]) -> dict[str, object]:
    if row.name != "retrieve_future":
        return {JSON: {"schema": schema_ref(schema_name(row.reply))}}
    promised = {schema_name(job.result_type) for job in ENDPOINTS.values() if job.result_type}
    names = ["Fault", "CompleteMetadata", *sorted(promised)]
    return {
        JSON: {"schema": {"anyOf": [schema_ref(name) for name in names]}},
        PROTO: {"schema": _BYTES},
    }


def _error_response(status: int) -> dict[str, object]:
    response: dict[str, object] = {
        "description": _ERRORS[status],
        "content": {JSON: {"schema": schema_ref("Fault")}},
    }
    if status in {429, 503}:
        header = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        response["headers"] = {"Retry-After": header}
    return response
