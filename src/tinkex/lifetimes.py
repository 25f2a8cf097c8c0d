"""How long a checkpoint may live, checked by clients, commands and servers alike."""

from __future__ import annotations

from tinkex.errors import InvalidInput

MAX_TTL_SECONDS = 10 * 365 * 24 * 3600


def check_ttl(ttl_seconds: int | None) -> int | None:
    """A lifetime of one second to ten years, or None for no end; InvalidInput if it is not."""
    if ttl_seconds is None:
        return None
    is_whole = isinstance(ttl_seconds, int) and not isinstance(ttl_seconds, bool)
    if not is_whole or not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidInput(
            f"ttl_seconds is {ttl_seconds!r:.80}; expected 1 to {MAX_TTL_SECONDS} (ten years), "
            "or None to keep it"
        )
    return ttl_seconds
