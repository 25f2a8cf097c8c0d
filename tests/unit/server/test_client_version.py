"""Detection of the client's SDK version."""

from __future__ import annotations

import pytest

from tinkex.server.http.request_context import ANONYMOUS, RequestContext
from tinkex.server.http.serializers import FIRST_WITH_EXTERNAL, NEWEST_VERSION, client_version

PACKAGE = "x-stainless-package-version"
AGENT = "user-agent"


@pytest.mark.parametrize(
    ("headers", "session", "expected"),
    [
        ({PACKAGE: "0.12.0", AGENT: "AsyncTinker/Python 0.36.0"}, "0.25.0", (0, 12, 0)),
        ({AGENT: "AsyncTinker/Python 0.25.1"}, "0.36.0", (0, 25, 1)),
        ({AGENT: "Tinker/Python 0.6"}, "", (0, 6, 0)),
        ({AGENT: "curl/8"}, "0.16.1", (0, 16, 1)),
        ({PACKAGE: "0.39.0rc1"}, "", (0, 39, 0)),
        ({PACKAGE: "unknown", AGENT: "AsyncTinker/Python 0.24.1"}, "", (0, 24, 1)),
        ({AGENT: "tinkex/0.1.0 (CPython)"}, "0.12.0", NEWEST_VERSION),
        ({PACKAGE: "9" * 400 + ".1.2"}, "", NEWEST_VERSION),
        ({}, "", NEWEST_VERSION),
    ],
)
def test_version_source_precedence(
    headers: dict[str, str], session: str, expected: tuple[int, int, int]
) -> None:
    call = RequestContext(
        endpoint="list_checkpoints", identity=ANONYMOUS, request=None, headers=headers
    )
    assert client_version(call, session) == expected


def test_first_version_with_external_checkpoints() -> None:
    assert (0, 27, 0) < FIRST_WITH_EXTERNAL <= (0, 28, 0) < NEWEST_VERSION
