"""HTTP answers, made once and written in one piece."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Headers: TypeAlias = list[tuple[bytes, bytes]]

_JSON = msgspec.json.Encoder()
JSON_TYPE = (b"content-type", b"application/json")
PROTO_TYPE = (b"content-type", b"application/x-protobuf")


class Answer:
    """A status, headers and a complete body; the content-length is added when it is sent."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: Headers) -> None:
        self.status = status
        self.body = body
        self.headers = headers


class Refusal(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail

    def answer(self) -> Answer:
        """The answer, in the form most servers of this API use."""
        return json_answer({"detail": self.detail}, self.status)


def json_answer(content: Any, status: int = 200) -> Answer:
    """An answer in JSON."""
    return Answer(status, _JSON.encode(content), [JSON_TYPE])


def proto_answer(body: bytes) -> Answer:
    """An answer in protobuf."""
    return Answer(200, body, [PROTO_TYPE])
