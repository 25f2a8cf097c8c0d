from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.http.request_context import TTLCache


def test_entry_expires_after_ttl() -> None:
    memory: TTLCache[str, int] = TTLCache(max_entries=2, ttl_seconds=10.0)
    memory.put("a", 1, now=100.0)

    assert memory.get("a", now=109.9) == 1
    assert memory.get("a", now=110.0) is None
    assert len(memory) == 0


def test_put_resets_ttl() -> None:
    memory: TTLCache[str, int] = TTLCache(max_entries=2, ttl_seconds=10.0)
    memory.put("a", 1, now=100.0)
    memory.put("a", 2, now=105.0)

    assert memory.get("a", now=112.0) == 2


def test_clear_removes_all_entries() -> None:
    memory: TTLCache[str, int] = TTLCache(max_entries=2, ttl_seconds=10.0)
    memory.put("a", 1)
    memory.clear()

    assert memory.get("a") is None


@given(st.lists(st.integers(0, 50)), st.integers(1, 8))
def test_oldest_entries_are_evicted(keys: list[int], max_entries: int) -> None:
    memory: TTLCache[int, int] = TTLCache(max_entries=max_entries, ttl_seconds=10.0)
    for key in keys:
        memory.put(key, key, now=0.0)

    newest = list(dict.fromkeys(reversed(keys)))[:max_entries]
    assert len(memory) == len(newest)
    assert all(memory.get(key, now=1.0) == key for key in newest)
