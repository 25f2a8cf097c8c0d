"""Child processes: restart, permanent failure, stop, heartbeats."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.server.config import ServerConfig
from tinkex.server.process.child_process import ChildProcess, ProcessSpec
from tinkex.server.process.child_setup import ChildSetup
from tinkex.server.process.restart_policy import RestartPolicy

QUICK = RestartPolicy(first_wait_seconds=0.001, max_startup_failures=3)


def child(tmp_path: Path, module: str) -> ChildProcess:
    orders = ChildSetup(config=ServerConfig(home=tmp_path), lock=2)
    return ChildProcess(ProcessSpec(name="test", module=module, setup=orders), QUICK)


@pytest.mark.asyncio
async def test_child_that_never_starts_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="test process cannot start: it exited with code 1"):
        await child(tmp_path, "tinkex.no_such_module").supervise()
    output, errors = capfd.readouterr()
    # Children write to standard error only.
    assert output == ""
    assert errors.count("No module named 'tinkex.no_such_module'") == QUICK.max_startup_failures


@pytest.mark.asyncio
async def test_child_is_restarted_after_server_was_ready(
    tmp_path: Path,
) -> None:
    process = child(tmp_path, "tinkex.no_such_module")
    process.was_ready = True
    task = asyncio.create_task(process.supervise())
    seen: set[int] = set()
    while len(seen) < QUICK.max_startup_failures + 1:
        seen |= {process.pid} - {0}
        await asyncio.sleep(0.001)
    process.stop()
    await task


@pytest.mark.asyncio
async def test_stop_during_child_startup(tmp_path: Path) -> None:
    # Its main runs until its input ends.
    process = child(tmp_path, "tokenize")
    task = asyncio.create_task(process.supervise())
    await asyncio.sleep(0)
    process.stop()
    async with asyncio.timeout(30):
        await task


@pytest.mark.asyncio
async def test_on_demand_child_starts_with_allow_start(
    tmp_path: Path,
) -> None:
    orders = ChildSetup(config=ServerConfig(home=tmp_path), lock=2)
    role = ProcessSpec(name="test", module="tokenize", setup=orders)
    waiting = ChildProcess(role, QUICK, start_immediately=False)
    begun = ChildProcess(role, QUICK, start_immediately=False)
    tasks = [asyncio.create_task(child.supervise()) for child in (waiting, begun)]
    begun.allow_start()
    async with asyncio.timeout(30):
        while not begun.pid:
            await asyncio.sleep(0.005)
        assert waiting.pid == 0
        for child in (waiting, begun):
            child.stop()
        await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_external_kills_do_not_exhaust_restarts(tmp_path: Path) -> None:
    # Its main runs until its input ends.
    process = child(tmp_path, "tokenize")
    task = asyncio.create_task(process.supervise())
    killed: set[int] = set()
    async with asyncio.timeout(60):
        while len(killed) < 2 * QUICK.max_startup_failures:
            if process.pid and process.pid not in killed:
                killed.add(process.pid)
                os.kill(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
    process.stop()
    await task


@pytest.mark.asyncio
async def test_blocked_child_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    orders = ChildSetup(config=ServerConfig(home=tmp_path), lock=2)
    module = "tests.integration.server.blocked_process"
    process = ChildProcess(
        ProcessSpec(name="test", module=module, setup=orders, hang_seconds=0.2), QUICK
    )
    task = asyncio.create_task(process.supervise())
    seen: set[int] = set()
    async with asyncio.timeout(60):
        while len(seen) < 3:
            seen |= {process.pid} - {0}
            await asyncio.sleep(0.005)
    process.stop()
    await task
    assert "has been blocked for more than 0.2 s; replacing it" in caplog.text
    assert "was killed by SIGKILL" in caplog.text


def test_child_process_closes_descriptors(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(2):
        with pytest.raises(ConfigError):
            asyncio.run(child(tmp_path, "tinkex.no_such_module").supervise())
    assert len(list(Path("/dev/fd").iterdir())) == before
