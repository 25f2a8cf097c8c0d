"""Dialects: which endpoints other servers of this API lack, and how their responses differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tinkex.errors import InvalidInput
from tinkex.testing.asgi import (
    CALL,
    ASGIApp,
    BufferedResponse,
    Headers,
    Receive,
    Scope,
    Send,
    buffer_response,
    json_response,
    send_response,
)
from tinkex.testing.calls import Call
from tinkex.wire.endpoints import ENDPOINTS

#: What came with SDK 0.36 and later, and servers of older versions lack.
_NEW = frozenset(
    {
        "retrieve_futures",
        "cancel_future",
        "join_sampling_session",
        "create_custom_loss",
        "save_weights_external",
        "external_weights_urls",
        "copy_weights",
        "finish_session",
        "search_checkpoints",
        "search_sessions",
        "get_current_checkpoint_storage_usage",
        "get_api_key",
        "delete_api_key",
    }
)
#: What only tinkex servers have.
_OWN = frozenset({name for name, row in ENDPOINTS.items() if row.is_tinkex_only})
_TUFT_LACKS = _NEW | _OWN | {"client_dynamic_config", "set_checkpoint_ttl"}
_SKYRL_LACKS = _TUFT_LACKS | {
    "telemetry",
    "auth_token",
    "publish_checkpoint",
    "unpublish_checkpoint",
    "list_sessions",
    "get_session",
    "list_checkpoints",
    "list_user_checkpoints",
    "assign_session_project",
    "export_session_trace",
    "get_audit_log",
    "get_billing_usage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of server."""

    name: str
    lacks: frozenset[str] = frozenset()
    """Endpoints, by table name, that are answered with 404."""
    reads_proto: bool = True
    """Takes forward_backward as protobuf."""
    reads_json: bool = False
    """Takes forward_backward as JSON."""
    writes_proto: bool = True
    """Answers results in protobuf when asked to."""
    names_sequences: bool = True
    """Says `sample_sequence_ids` in the promise of a sample."""
    long_promises: bool = False
    """Promises say `future_id` and `status` too."""
    fails_by_status: bool = False
    """A failed promise is an error status instead of 200 with an error in it."""
    pending_is_ok: bool = False
    """A pending promise is 200 `try_again` instead of 408."""
    archive_redirects: bool = True
    """The archive endpoint answers 302 instead of 200 with a URL."""
    has_inference: bool = False
    """Has the endpoints below /v1."""

    def rewrites(self, endpoint: str) -> bool:
        """Whether responses of an endpoint differ from those of the real server."""
        if endpoint == "retrieve_future":
            return self.pending_is_ok or self.fails_by_status
        row = ENDPOINTS.get(endpoint)
        is_promise = row is not None and row.result_type is not None
        return is_promise and (self.long_promises or not self.names_sequences)


DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(name="current", has_inference=True),
        Dialect(name="training-only"),
        Dialect(
            name="skyrl",
            lacks=_SKYRL_LACKS,
            reads_proto=False,
            reads_json=True,
            writes_proto=False,
            names_sequences=False,
            long_promises=True,
            fails_by_status=True,
        ),
        Dialect(
            name="tuft",
            lacks=_TUFT_LACKS,
            reads_json=True,
            names_sequences=False,
            pending_is_ok=True,
            archive_redirects=False,
        ),
    )
}


def find_dialect(name: str) -> Dialect:
    """A dialect by name."""
    if name not in DIALECTS:
        raise InvalidInput(f"dialect is {name!r}; expected one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


class DialectAdapter:
    """Makes the application behave like another kind of server of this API."""

    def __init__(self, app: ASGIApp, dialect: Dialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what this kind of server does not read, and rewrite what it answers."""
        call: Call | None = scope.get(CALL)
        if call is None:
            await self._app(scope, receive, send)
            return
        refusal = self._refuse(call)
        if refusal is not None:
            await send_response(send, refusal)
            return
        is_archive = call.endpoint == "checkpoint_archive"
        if not self._dialect.writes_proto or (is_archive and not self._dialect.archive_redirects):
            scope = {**scope, "headers": _accept_json(scope["headers"])}
        if not self._dialect.rewrites(call.endpoint):
            await self._app(scope, receive, send)
            return
        response = await buffer_response(self._app, scope, receive)
        await send_response(send, self._rewrite(call, response))

    def _refuse(self, call: Call) -> BufferedResponse | None:
        is_inference = call.path.startswith("/v1/")
        if call.endpoint in self._dialect.lacks or (
            is_inference and not self._dialect.has_inference
        ):
            return json_response(404, {"detail": f"no such endpoint: {call.method} {call.path}"})
        if call.endpoint == "forward_backward":
            is_readable = self._dialect.reads_proto if call.is_proto else self._dialect.reads_json
            if not is_readable:
                content_type = call.headers.get("content-type", "no content type")
                return json_response(
                    415, {"detail": f"forward_backward cannot be read as {content_type}"}
                )
        return None

    def _rewrite(self, call: Call, response: BufferedResponse) -> BufferedResponse:
        if not _is_json(response) or response.status >= 500:
            return response
        content = msgspec.json.decode(response.body)
        if call.endpoint == "retrieve_future":
            return self._rewrite_result(response, content)
        if "request_id" not in content:
            return response
        if not self._dialect.names_sequences:
            content.pop("sample_sequence_ids", None)
        if self._dialect.long_promises:
            content |= {"future_id": content["request_id"], "status": "pending"}
        return response.with_json(content)

    def _rewrite_result(self, response: BufferedResponse, content: Any) -> BufferedResponse:
        if response.status == 408:
            if self._dialect.pending_is_ok:
                return response.with_json({"type": "try_again", **content}, 200)
            if self._dialect.fails_by_status:
                return response.with_json({"detail": "Timeout waiting for result"}, 408)
        is_failure = response.status == 200 and "error" in content and "category" in content
        if not (is_failure and self._dialect.fails_by_status):
            return response
        if content["category"] == "user":
            return response.with_json({"detail": content["error"]}, 400)
        return response.with_json({"detail": "Unknown error"}, 500)


def _accept_json(headers: Headers) -> Headers:
    return [
        *(pair for pair in headers if pair[0] != b"accept"),
        (b"accept", b"application/json"),
    ]


def _is_json(response: BufferedResponse) -> bool:
    return any(
        name.lower() == b"content-type" and b"json" in value for name, value in response.headers
    )
