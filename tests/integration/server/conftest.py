"""Fixtures shared by the server tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_harness import ServerHarness, open_harness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ServerHarness]:
    """A server with default settings except for short long polls."""
    with open_harness(tmp_path / "home") as opened:
        yield opened
