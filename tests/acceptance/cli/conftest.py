"""Fixtures: a real server, and users with `tinkex` and the official CLI."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.official_cli import Command, official_forks
from tests.support.real_server import TIMEOUT_SECONDS, RealServer, clean_environment, start_server

TINKEX = [sys.executable, "-m", "tinkex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The `tinkex` command of one user; each call is a new process."""

    directory: Path
    environment: Mapping[str, str]

    def __call__(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command and check its exit code."""
        done = subprocess.run(
            [*TINKEX, *words],
            env=dict(self.environment),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == status, f"tinkex {' '.join(words)}: {done}"
        assert "Traceback" not in done.stderr
        return done

    def json(self, *words: str, status: int = 0) -> Any:
        """Run a command and parse its JSON output."""
        return json.loads(self(*words, "--json", status=status).stdout)


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user with a key and both CLIs."""

    url: str
    key: str
    directory: Path
    ours: Ours
    theirs: Command

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for both CLIs."""
        return self.ours.environment

    def active_sessions(self) -> list[str]:
        """Return the active sessions of this user."""
        listed = self.ours.json("session", "list", "--status", "active", "--base-url", self.url)
        return [each["session_id"] for each in listed["sessions"]]


@pytest.fixture(scope="package")
def cli_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server started by `tinkex serve`."""
    server = start_server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def forks() -> Any:
    """A process that has imported the official CLI and forks for each call."""
    return official_forks()


@pytest.fixture
def user(cli_server: RealServer, forks: Any, tmp_path: Path) -> User:
    """A new user for each test."""
    key = cli_server.new_key(tmp_path.name)
    environment = clean_environment(
        TINKER_BASE_URL=cli_server.url,
        TINKER_API_KEY=key,
        TINKEX_TELEMETRY="0",
        HOME=str(tmp_path),
        COLUMNS="250",
    )
    return User(
        url=cli_server.url,
        key=key,
        directory=tmp_path,
        ours=Ours(directory=tmp_path, environment=environment),
        theirs=Command(forks=forks, directory=tmp_path, environment=environment),
    )
