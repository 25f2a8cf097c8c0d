"""Questions to a server that the clients have no method for; the same road, the same retries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.wire.endpoints import Endpoint
    from tinkex.wire.messages import ApiKeyReply

T = TypeVar("T")


def call_endpoint(
    client: RestClient,
    endpoint: Endpoint[Any, T],
    message: object = None,
    ids: Mapping[str, str] | None = None,
) -> T:
    """Call an endpoint and wait for the answer."""
    holder = client.holder

    async def call() -> T:
        await holder.ready()
        return await holder.transport.call(endpoint, message, ids=ids)

    return holder.start(call()).result()


def fetch_api_key_info(client: RestClient) -> ApiKeyReply | None:
    """Whose the key is; None if the server knows no names of keys."""
    from tinkex.errors import APIStatusError
    from tinkex.wire.endpoints import API_KEY

    try:
        return call_endpoint(client, API_KEY)
    except APIStatusError as error:
        if error.status in {404, 405, 501}:
            return None
        raise
