"""Opening a server's store: what is said when it is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import StoreError
from tinkex.server.config import ServerConfig
from tinkex.server.wiring import open_store, shown_url


@pytest.mark.parametrize("content", [b"no database at all" * 100, None])
def test_a_store_that_cannot_be_used_is_named_with_what_to_do(
    tmp_path: Path, content: bytes | None
) -> None:
    store = tmp_path / "store.db"
    if content is None:
        store.mkdir()
    else:
        store.write_bytes(content)
    with pytest.raises(StoreError) as refused, open_store(ServerConfig(home=tmp_path)):
        pass
    assert str(store) in (refused.value.hint or "")
    assert "backup" in (refused.value.hint or "")


def test_a_password_is_never_shown() -> None:
    shown = shown_url("postgresql://me:secret@db.example.org/tinkex")
    assert shown == "postgresql://me:***@db.example.org/tinkex"
