"""Base class of the REST clients, which call endpoints without a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tinkex.client.config import Config
from tinkex.client.future import APIFuture, map_future
from tinkex.client.holder import Holder
from tinkex.client.telemetry import Telemetry
from tinkex.errors import InvalidInput
from tinkex.wire.endpoints import Endpoint
from tinkex.wire.messages import Empty

T = TypeVar("T")


class SessionlessClient:
    """A client that calls endpoints without opening a session."""

    def __init__(
        self,
        _holder: Holder | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is not None and (base_url is not None or api_key is not None):
            raise InvalidInput("Pass either base_url and api_key, or a holder, not both")
        self.holder = _holder or Holder(
            Config.new(base_url=base_url, api_key=api_key), needs_worker=False
        )

    def get_telemetry(self) -> Telemetry | None:
        """Return the telemetry reporter; None unless telemetry is enabled."""
        return self.holder.telemetry

    def _call(
        self,
        endpoint: Endpoint[object, T],
        ids: Mapping[str, str] | None = None,
        message: object = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> APIFuture[T]:
        """Call an endpoint; query values of None are omitted."""
        # In the caller's thread: reject a bad id before anything is sent.
        endpoint.url_path(**(ids or {}))
        all_headers = {"x-sdk-method": endpoint.name} | dict(headers or {})

        async def call() -> T:
            await self.holder.ready()
            return await self.holder.transport.call(
                endpoint, message, ids=ids, query=query, headers=all_headers
            )

        return self.holder.start(call())


def page_query(limit: int, offset: int) -> dict[str, object]:
    """Return the query parameters of one page."""
    for name, value, least in (("limit", limit, 1), ("offset", offset, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidInput(f"{name} must be {least} or more, got {value!r}")
    return {"limit": limit, "offset": offset}


def discard_reply(future: APIFuture[Empty]) -> APIFuture[None]:
    """Return a future that resolves to None instead of an empty reply."""
    return map_future(future, lambda reply: None)
