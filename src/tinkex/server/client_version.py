"""Which version of the official SDK sent a request, for replies that old versions cannot parse."""

from __future__ import annotations

import re
from typing import Any, Final

from tinkex.server.call import RequestContext

#: The version of a client that does not state one; it gets the current form of every reply.
NEWEST_VERSION: Final = (1 << 31, 0, 0)
#: The first SDK whose `CheckpointType` has "external"; older ones reject a list that contains it.
FIRST_WITH_EXTERNAL: Final = (0, 28, 0)

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_USER_AGENT = re.compile(r"(?:Async)?Tinker/Python (\S+)")


def client_version(
    context: RequestContext[Any], session_sdk_version: str = ""
) -> tuple[int, int, int]:
    """The SDK version as three numbers, or `NEWEST`; never a reason to refuse a request.

    The first of these that has a version decides: the header X-Stainless-Package-Version, the
    User-Agent of the official SDK, and the version that created the session of the request.
    """
    agent = context.headers.get("user-agent", "")
    if agent.startswith("tinkex/"):
        return NEWEST_VERSION
    found = _USER_AGENT.match(agent)
    stated = context.headers.get("x-stainless-package-version", "")
    for text in (stated, found[1] if found else "", session_sdk_version):
        if version := _VERSION.match(text):
            major, minor, patch = (int(part or 0) for part in version.groups())
            return major, minor, patch
    return NEWEST_VERSION
