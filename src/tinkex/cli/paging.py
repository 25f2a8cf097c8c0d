"""Lists that come in pages: as many as were asked for, however small the server's pages are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


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
