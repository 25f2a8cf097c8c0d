"""Requests for which the clients have no method, and fetching of paged lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.wire.endpoints import Endpoint
    from tinkex.wire.messages import ApiKeyReply

T = TypeVar("T")
RequestT = TypeVar("RequestT")


def call_endpoint(
    client: RestClient,
    endpoint: Endpoint[RequestT, T],
    message: object = None,
    ids: Mapping[str, str] | None = None,
) -> T:
    """Call an endpoint and wait for the response."""
    holder = client.holder

    async def call() -> T:
        await holder.ready()
        return await holder.transport.call(endpoint, message, ids=ids)

    return holder.start(call()).result()


def fetch_api_key_info(client: RestClient) -> ApiKeyReply | None:
    """Return the owner of the API key; None if the server does not report it."""
    from tinkex.errors import APIStatusError
    from tinkex.wire.endpoints import API_KEY

    try:
        return call_endpoint(client, API_KEY)
    except APIStatusError as error:
        if error.status in {404, 405, 501}:
            return None
        raise


class Listing(NamedTuple, Generic[T]):
    """The first items of a list."""

    items: Sequence[T]
    total: int
    """Total number of items on the server."""

    @property
    def num_hidden(self) -> int:
        """Number of items not in this listing."""
        return max(0, self.total - len(self.items))


def fetch_pages(
    fetch_page: Callable[[int, int], Listing[T]],
    limit: int,
    page_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Listing[T]:
    """Return the first `limit` items (0: all); `fetch_page` takes a page's limit and offset."""
    items: list[T] = []
    total, wanted = 0, limit or page_size
    while len(items) < wanted:
        page = fetch_page(min(page_size, wanted - len(items)), len(items))
        if not page.items:
            # The list became shorter in the meantime, or the server's total is wrong.
            return Listing(items, len(items))
        items.extend(page.items)
        total = max(page.total, len(items))
        wanted = min(limit, total) if limit else total
        on_progress(len(items), wanted)
    return Listing(items, total)
