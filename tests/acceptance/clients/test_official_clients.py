"""The official clients of the OpenAI and Anthropic APIs against a server with scripted models."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.compat.clients.registry import Place
from tests.compat.clients.run import run_client
from tests.compat.clients.serving import serving_scripted
from tests.compat.results import PASS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with serving_scripted(tmp_path_factory.mktemp("clients") / "home") as place:
        yield place


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_official_client_passes_its_scenarios(client: str, place: Place) -> None:
    outcomes = run_client(client, Path(sys.executable), place)
    assert len(outcomes) > 10
    failed = {each.name: each.detail for each in outcomes if each.status != PASS}
    assert not failed, failed


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/oai/api/v1/completions", "/v1/messages"]
)
def test_large_bodies_are_refused_by_their_length(path: str, place: Place) -> None:
    parts = urlsplit(place.url)
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {place.key}"]
    head += ["Content-Type: application/json", "Content-Length: 99999999", "", "{"]
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")
