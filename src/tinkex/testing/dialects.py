"""How servers of this API differ: which endpoints they have, and how they word their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinkex.errors import InvalidInput
from tinkex.wire.endpoints import ENDPOINTS

#: What came with SDK 0.36 and servers of older versions lack.
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
        Dialect(name="current"),
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


def check_endpoint(name: str) -> str:
    """Return a name of the endpoint table (or `download`), or refuse a misspelled one."""
    if name not in ENDPOINTS and name != DOWNLOAD:
        raise InvalidInput(f"{name!r} is not an endpoint; known are {', '.join(ENDPOINTS)}")
    return name


#: What file downloads are called among the endpoints, which have no row for them.
DOWNLOAD = "download"
