"""Houses that the server's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_harness import House, open_house


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A server with default settings, but for short long polls."""
    with open_house(tmp_path / "home") as opened:
        yield opened
