"""The application asked directly, a piece of body at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.support.server_harness import KEY


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes
    num_read: int
    """How many pieces of the body were asked for."""

    @property
    def error(self) -> str:
        """The sentence of a refusal."""
        said: str = json.loads(self.body)["error"]
        return said


async def send_request(
    app: Any,
    method: str,
    path: str,
    pieces: Iterable[bytes | None] = (b"",),
    headers: dict[str, str] | None = None,
    client: str = "127.0.0.1",
) -> Reply:
    """One request whose body comes in pieces; None is a client that goes away."""
    given = {"host": "test", "x-api-key": KEY, **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": (client, 1),
        "server": ("test", 80),
    }
    left = iter(pieces)
    sent: list[dict[str, Any]] = []
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        piece = next(left, b"")
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": piece != b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    assert len(sent) == 2, "an answer is one head and one body"
    return Reply(sent[0]["status"], names, body, num_read)
