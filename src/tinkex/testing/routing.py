"""From a path to its row of the endpoint table, and to the function that answers it."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from tinkex.testing import (
    routes_futures,
    routes_rest,
    routes_sampling,
    routes_service,
    routes_training,
    routes_weights,
)
from tinkex.testing.dialects import DOWNLOAD, Dialect
from tinkex.testing.downloads import FILES, download
from tinkex.testing.state import Handler
from tinkex.wire.endpoints import ENDPOINTS, PREFIX

HANDLERS: dict[str, Handler] = {
    **routes_service.ROUTES,
    **routes_training.ROUTES,
    **routes_weights.ROUTES,
    **routes_sampling.ROUTES,
    **routes_futures.ROUTES,
    **routes_rest.ROUTES,
}
"""The function behind every row of the table."""

#: Rows that are answered without a key.
OPEN = frozenset({"health", DOWNLOAD})
_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")


class Route(NamedTuple):
    """Where a request goes; without a handler it is not served."""

    endpoint: str
    handler: Handler | None
    is_open: bool


NOWHERE = Route("", None, True)
_DOWNLOAD = Route(DOWNLOAD, download, True)


class Router:
    """Finds the route of a request: by a dict for plain paths, by patterns for those with ids."""

    def __init__(self, dialect: Dialect) -> None:
        self._plain: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Route]] = []
        for name, endpoint in ENDPOINTS.items():
            handler = None if name in dialect.lacks else HANDLERS[name]
            route = Route(name, handler, name in OPEN)
            path = PREFIX + endpoint.path
            if "{" in path:
                self._patterns.append((endpoint.method, _pattern(path), route))
            else:
                self._plain[endpoint.method, path] = route

    def find(self, method: str, raw_path: str) -> tuple[Route, dict[str, str]]:
        """The route, and the ids in the path; the path is still quoted."""
        route = self._plain.get((method, raw_path))
        if route is not None:
            return route, {}
        for wanted, pattern, candidate in self._patterns:
            match = pattern.fullmatch(raw_path) if wanted == method else None
            if match is not None:
                return candidate, {name: unquote(text) for name, text in match.groupdict().items()}
        if raw_path.startswith(FILES) and method in {"GET", "HEAD"}:
            return _DOWNLOAD, {}
        return NOWHERE, {}


def _pattern(path: str) -> re.Pattern[str]:
    """A checkpoint id is two segments, every other id is one."""

    def placeholder(match: re.Match[str]) -> str:
        segment = "[^/]+/[^/]+" if match[1] == "checkpoint_id" else "[^/]+"
        return f"(?P<{match[1]}>{segment})"

    return re.compile(_PLACEHOLDER.sub(placeholder, re.escape(path)))
