"""Limits of checkpoint lifetimes."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.errors import InvalidInput
from tinkex.ids import MAX_TTL_SECONDS, check_ttl


@pytest.mark.parametrize("ttl_seconds", [None, 1, 86400, MAX_TTL_SECONDS])
def test_valid_ttl_is_accepted(ttl_seconds: int | None) -> None:
    assert check_ttl(ttl_seconds) == ttl_seconds


@pytest.mark.parametrize("ttl_seconds", [0, -1, MAX_TTL_SECONDS + 1, 10**30, True, 1.5, "7d"])
def test_invalid_ttl_is_refused(ttl_seconds: Any) -> None:
    with pytest.raises(InvalidInput, match=f"expected 1 to {MAX_TTL_SECONDS}"):
        check_ttl(ttl_seconds)
