"""The rules of unit tests: no processes, no connections, no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

HEAVY = frozenset({"torch", "transformers", "ray"})
FORBIDDEN_EVENTS = frozenset(
    {"socket.bind", "socket.connect", "subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec"}
)
_running: list[str] = []


def _check_event(event: str, args: tuple[object, ...]) -> None:
    """Raise if a unit test does what belongs into an integration test."""
    if not _running:
        return
    is_heavy_import = event == "import" and str(args[0]).partition(".")[0] in HEAVY
    if event in FORBIDDEN_EVENTS or is_heavy_import:
        what = f"imports {args[0]}" if is_heavy_import else f"calls {event}"
        raise RuntimeError(f"{_running[-1]} {what}; such a test belongs into tests/integration")


sys.addaudithook(_check_event)


@pytest.fixture(autouse=True)
def forbid_heavy_events(request: pytest.FixtureRequest) -> Iterator[None]:
    """Enforce the rules while a test runs."""
    _running.append(request.node.nodeid)
    yield
    _running.pop()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a run of unit tests whose modules import torch."""
    is_unit_only = all("tests/unit/" in str(item.path) for item in session.items)
    loaded = sorted(HEAVY & set(sys.modules))
    if session.items and is_unit_only and loaded:
        raise pytest.UsageError(f"a unit test module imports {', '.join(loaded)}")
