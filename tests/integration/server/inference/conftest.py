"""Servers and clients of the inference tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tinkex.testing import StubServer

KEY = "tml-alice"
OTHER_KEY = "tml-bob"
MODEL = "tinkex/bigram"
TIMEOUT_SECONDS = 30.0


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer(api_keys=[KEY, OTHER_KEY]) as opened:
        yield opened


@pytest.fixture
def connect(server: StubServer) -> Iterator[Callable[..., httpx.Client]]:
    """Make HTTP clients that close with the test."""
    with ExitStack() as stack:

        def make(key: str = KEY, **options: Any) -> httpx.Client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return stack.enter_context(
                httpx.Client(
                    base_url=server.url, headers=headers, timeout=TIMEOUT_SECONDS, **options
                )
            )

        yield make


@pytest.fixture
def client(connect: Callable[..., httpx.Client]) -> httpx.Client:
    return connect()
