"""Questions to a server that the clients have no method for; the same road, the same retries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

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


class Listing(NamedTuple, Generic[T]):
    """The first items of a list."""

    items: Sequence[T]
    total: int
    """How many there are in all."""

    @property
    def num_hidden(self) -> int:
        """How many there are besides."""
        return max(0, self.total - len(self.items))


def fetch_pages(
    fetch_page: Callable[[int, int], Listing[T]],
    limit: int,
    page_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Listing[T]:
    """The first `limit` items, 0 for all; `ask` takes limit and offset of one page."""
    items: list[T] = []
    whole, wanted = 0, limit or page_size
    while len(items) < wanted:
        page = fetch_page(min(page_size, wanted - len(items)), len(items))
        if not page.items:
            # The list has become shorter meanwhile, or the server miscounted.
            return Listing(items, len(items))
        items.extend(page.items)
        whole = max(page.total, len(items))
        wanted = min(limit, whole) if limit else whole
        on_progress(len(items), wanted)
    return Listing(items, whole)
