"""Requests count as activity, except for health checks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import StoreBusy
from tinkex.home import Home
from tinkex.server.periodic import PeriodicTask
from tinkex.server.process.api_process import IGNORED_PATHS, ActivityMiddleware


async def send_request(activity: ActivityMiddleware, path: str, kind: str = "http") -> None:
    await activity({"type": kind, "path": path}, None, None)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.activity_file.touch()
    os.utime(home.activity_file, (1.0, 1.0))
    return home


@pytest.mark.asyncio
@pytest.mark.parametrize("path", sorted(IGNORED_PATHS))
async def test_health_checks_do_not_count_as_activity(home: Home, path: str) -> None:
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])

    activity = ActivityMiddleware(app, home)
    await send_request(activity, path)
    await send_request(activity, "/api/v1/heartbeat", "lifespan")
    assert home.activity_file.stat().st_mtime == 1.0
    await send_request(activity, "/api/v1/heartbeat")
    assert home.activity_file.stat().st_mtime > 1.0
    # Every request is forwarded.
    assert len(asked) == 3


@pytest.mark.asyncio
async def test_activity_file_touch_is_throttled(home: Home) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    activity = ActivityMiddleware(app, home)
    await send_request(activity, "/api/v1/heartbeat")
    os.utime(home.activity_file, (1.0, 1.0))
    for _ in range(100):
        await send_request(activity, "/api/v1/heartbeat")
    assert home.activity_file.stat().st_mtime == 1.0


@pytest.mark.asyncio
async def test_missing_home_does_not_fail_requests(home: Home) -> None:
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])

    home.activity_file.unlink()
    await send_request(ActivityMiddleware(app, home), "/any")
    assert asked == ["/any"]


def test_periodic_task_continues_after_database_error() -> None:
    done = threading.Event()
    calls = iter([StoreBusy("busy"), OSError("gone"), None])

    def duty() -> None:
        outcome = next(calls, None)
        if outcome is not None:
            raise outcome
        done.set()

    with PeriodicTask("test", duty, 0.001):
        assert done.wait(60.0)
