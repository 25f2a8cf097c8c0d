"""A real server for the tests: `tinkex serve` in processes of its own, with a home of its own."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tinkex.cli.main import main

#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 180.0
READY = "tinkex server ready at "
_LOG_TAIL_BYTES = 20_000
_ANSWERS = re.compile(r'^tinkex_requests_total{endpoint="(\w+)",status="(\d+)"} (\S+)', re.M)
_PROCESS = re.compile(r'^tinkex_api_process{pid="(\d+)"}', re.M)


def clean_environment(**more: str) -> dict[str, str]:
    """The variables of this process without those that configure a client or a server."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TINKER_", "TINKEX_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


@dataclass(frozen=True, slots=True)
class RealServer:
    """A running server, and what one must know to use it."""

    home: Path
    url: str
    process: subprocess.Popen[str]

    @property
    def key(self) -> str:
        """The key that the server made for the owner of its home."""
        return (self.home / "key").read_text("ascii").strip()

    @property
    def log(self) -> str:
        """The end of what the server said."""
        return read_log(self.home)

    def new_key(self, tenant: str) -> str:
        """A key for a tenant, made by the command while the server runs."""
        command = ["key", "create", "--home", str(self.home), "--tenant", tenant, "--json"]
        unset = dict.fromkeys(name for name in os.environ if name.startswith("TINKEX_"))
        answer = CliRunner(env=unset).invoke(main, command, catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        secret: str = json.loads(answer.stdout)["key"]
        return secret

    def answers(self, num_processes: int = 1) -> Counter[tuple[str, int]]:
        """How often which endpoint answered with which status; each process counts its own."""
        counted: dict[str, str] = {}

        def ask_until_all_answered() -> bool:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT_SECONDS) as response:
                text = response.read().decode()
            counted[_PROCESS.findall(text)[0]] = text
            return len(counted) == num_processes

        eventually(ask_until_all_answered)
        found: Counter[tuple[str, int]] = Counter()
        for endpoint, status, number in _ANSWERS.findall("".join(counted.values())):
            found[endpoint, int(status)] += int(float(number))
        return found

    def stop(self) -> None:
        """Ask the server to stop, and see that it does so in good order."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(TIMEOUT_SECONDS)
        finally:
            self.process.kill()
            self.process.communicate()
        assert status == 0, f"the server ended with {status}:\n{self.log}"


def start_server(
    home: Path, settings: Mapping[str, Any] | None = None, *, engine: str = "fake"
) -> RealServer:
    """Start a server on a home and wait until it says that it is ready."""
    home.mkdir(parents=True, exist_ok=True)
    if settings:
        (home / "server.toml").write_text(as_toml(settings), "utf-8")
    command = [sys.executable, "-m", "tinkex", "serve", "--home", str(home), "--port", "0"]
    with (home / "stderr.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--engine", engine],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=clean_environment(),
            text=True,
        )
    line = _first_line(process)
    if not line.startswith(READY):
        process.kill()
        process.communicate()
        raise AssertionError(f"the server did not start: {line!r}\n{read_log(home)}")
    return RealServer(home=home, url=line.removeprefix(READY).strip(), process=process)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(TIMEOUT_SECONDS) else ""


def read_log(home: Path) -> str:
    """The end of what the server of a home said."""
    content = (home / "stderr.log").read_bytes()
    return content[-_LOG_TAIL_BYTES:].decode(errors="replace")


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML; JSON writes texts, numbers and truth the same way."""
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {json.dumps(settings[name])}" for name in settings if name not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    status: int = 0,
    stdin_text: str = "",
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and see that it ends with this status."""
    done = subprocess.run(
        command,
        env=environment,
        input=stdin_text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        **options,
    )
    told = f"{' '.join(command)}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == status, told
    return done


def eventually(check: Callable[[], bool], seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait until something is true that no event tells of; fails if it never is."""
    ends_at = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < ends_at, "it never came true"
        time.sleep(0.05)
