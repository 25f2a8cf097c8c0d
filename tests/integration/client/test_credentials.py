"""Credentials printed by a command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.token_exchange import KEY, Exchange
from tinkex.client.credentials import (
    Credential,
    find_credential,
    run_credential_command,
)
from tinkex.errors import ConfigError
from tinkex.settings import Environment


@pytest.mark.asyncio
async def test_credential_command_output_is_used() -> None:
    assert await run_credential_command("echo '  tml-from-cmd  '; echo noise >&2") == "tml-from-cmd"
    found = find_credential(None, Environment(credential_command="echo tml-from-cmd"))
    assert found is not None
    assert await found.read() == "tml-from-cmd"
    assert await Credential(source="argument", value=KEY).read() == KEY


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo hush-hush; echo first >&2; echo last >&2; exit 3", "exit code 3: last$"),
        ("echo hush-hush; exit 1", "exit code 1$"),
        ("echo hush-hush; echo failed with hush-hush >&2; exit 1", r"1: failed with \*\*\*$"),
        ("true", "printed no credential$"),
        ("echo '  '; echo 'please log in' >&2", "printed no credential: please log in$"),
        ("no-such-command-at-all", "exit code 127"),
    ],
)
async def test_failing_command_error_shows_stderr_only(command: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        await run_credential_command(command)
    assert "hush-hush" not in str(caught.value)


def num_open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.mark.asyncio
@pytest.mark.parametrize("command", ["sleep 60", "sleep 60 & exit 0", "sleep 60 | cat"])
async def test_hanging_command_is_killed(command: str) -> None:
    await run_credential_command("echo warm")
    num_open = num_open_files()
    started_at = time.monotonic()
    with pytest.raises(ConfigError, match=r"within 0\.2 seconds"):
        await run_credential_command(command, timeout_seconds=0.2)
    assert time.monotonic() - started_at < 10
    assert num_open_files() == num_open, "its pipes are closed"


@pytest.mark.asyncio
async def test_command_must_print_one_key() -> None:
    credential = Credential(source="TINKER_CREDENTIAL_CMD", command="printf 'a\\nb'")
    with pytest.raises(ConfigError, match="TINKER_CREDENTIAL_CMD contains a space"):
        await credential.read()


@pytest.mark.asyncio
async def test_command_runs_for_every_exchange(tmp_path: Path) -> None:
    counter = tmp_path / "n"
    command = f"echo x >> {counter}; echo tml-$(grep -c x {counter})"
    exchange = Exchange(lifetime_seconds=10)
    source = exchange.source(Credential(source="TINKER_CREDENTIAL_CMD", command=command))
    await source.get()
    await source.get()
    assert exchange.seen == ["tml-1", "tml-2"]
