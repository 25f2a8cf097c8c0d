"""Servers that end with their test, and a clean environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.support.serve_process import ServeProcess


class Serve(Protocol):
    """Starts servers that end with the test."""

    def __call__(self, home: Path, *flags: str, **options: Any) -> ServeProcess: ...


@pytest.fixture(autouse=True)
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove this machine's key, URL and home; use the fake engine."""
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINKEX_", "CLOUDFLARE_ACCESS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_ENGINE", "fake")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(home: Path, *flags: str, **options: Any) -> ServeProcess:
            serve_process = ServeProcess(home, *flags, **options)
            stack.callback(serve_process.end)
            return serve_process

        yield start
