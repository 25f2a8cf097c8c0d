"""Servers, clients and batches that the integration tests share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from tests.support.statement_cache import share_statements
from tinkex import Datum, ModelInput, SamplingParams, ServiceClient
from tinkex.engine.fake.bigram import Bigram
from tinkex.testing import StubServer

BASE_MODEL = "tinkex/bigram"
KEY = "tml-integration"
HELLO = list(b"hello hello hello")
PROMPT = ModelInput.from_ints(list(b"hello"))
SHORT = SamplingParams(max_tokens=4)
#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 60.0

share_statements()


class Serve(Protocol):
    """Starts stub servers that stop with the test."""

    def __call__(self, **options: Any) -> StubServer: ...


class Connect(Protocol):
    """Makes service clients that close with the test."""

    def __call__(self, server: StubServer | str, **options: Any) -> ServiceClient: ...


class Events:
    """An event hook that keeps what it was told."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, event: Any) -> None:
        with self._changed:
            self._seen.append(event)
            self._changed.notify_all()

    def of(self, kind: type[Any], **fields: Any) -> list[Any]:
        """Events of a kind whose fields have these values."""
        with self._changed:
            return [event for event in self._seen if _fits(event, kind, fields)]

    def wait_for(self, count: int, kind: type[Any], **fields: Any) -> list[Any]:
        """Block until that many such events came."""
        with self._changed:
            self._changed.wait_for(
                lambda: sum(_fits(event, kind, fields) for event in self._seen) >= count,
                TIMEOUT_SECONDS,
            )
        found = self.of(kind, **fields)
        assert len(found) >= count, f"{len(found)} of {count} {kind.__name__} {fields}"
        return found


def _fits(event: Any, kind: type[Any], fields: dict[str, Any]) -> bool:
    return isinstance(event, kind) and all(
        getattr(event, name) == value for name, value in fields.items()
    )


@pytest.fixture(autouse=True)
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, URL or stored credential of this machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINKEX_", "CLOUDFLARE_ACCESS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(StubServer(**options))


@pytest.fixture
def connect(serve: Serve) -> Iterator[Connect]:
    """Depends on `serve`, so that clients close before their servers stop."""
    made: list[ServiceClient] = []

    def make(server: StubServer | str, **options: Any) -> ServiceClient:
        url = server if isinstance(server, str) else server.url
        made.append(ServiceClient(base_url=url, **{"api_key": KEY, **options}))
        return made[-1]

    yield make
    for client in made:
        client.close().result(TIMEOUT_SECONDS)


@pytest.fixture
def server(serve: Serve) -> StubServer:
    return serve()


@pytest.fixture
def service(server: StubServer, connect: Connect) -> ServiceClient:
    return connect(server)


def datum(tokens: Sequence[int] = HELLO, weight: float = 1.0) -> Datum:
    """Predict each token from the one before it."""
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [weight] * (len(tokens) - 1)},
    )


def base_logprobs(tokens: Sequence[int]) -> np.ndarray:
    """What the base model gives to each token but the first, worked out here from its logits."""
    logits = _base_logits()
    rows = logits[list(tokens[:-1])]
    chosen = logits[list(tokens[:-1]), list(tokens[1:])]
    scores: np.ndarray = chosen - np.log(np.exp(rows).sum(axis=1))
    return scores


@cache
def _base_logits() -> np.ndarray:
    return Bigram.base(BASE_MODEL).logits_VV


def eventually(check: Callable[[], bool], seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait until something is true; fails if it never is."""
    ends_at = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < ends_at, "it never came true"
        time.sleep(0.005)
