"""A process of the server: started, started again when it dies, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.server.handover import Orders
from tinkex.server.heartbeat import Heartbeat
from tinkex.server.restarts import RestartPolicy, describe_exit, is_own_failure
from tinkex.settings import child_environment

LOG = get_logger(__name__)
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a process is for."""

    name: str
    """What the log calls it."""
    module: str
    """What it runs."""
    orders: Orders
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables it gets unless they are set already."""
    hang_seconds: float = 0.0
    """Replace the process when its loop has been blocked for so long; 0 never does."""


class Child:
    """One process, whichever pid it has at the moment."""

    def __init__(self, role: Role, policy: RestartPolicy, *, starts_at_once: bool = True) -> None:
        self.role = role
        self.was_ready = False
        """Set when the server has been ready once: from then on nothing is hopeless."""
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None
        self._num_quick_deaths = 0
        self._num_failures = 0
        self._stopping = asyncio.Event()
        self._begun = asyncio.Event()
        if starts_at_once:
            self.begin()

    def begin(self) -> None:
        """Let `keep` start the process."""
        self._begun.set()

    async def keep(self) -> None:
        """Run the process again and again until `stop`; raises if it cannot even start."""
        await self._begun.wait()
        while not self._stopping.is_set():
            started_at = time.monotonic()
            exit_code, pid = await self._run()
            if self._stopping.is_set():
                return
            wait_seconds = self._judge(exit_code, time.monotonic() - started_at)
            how = describe_exit(exit_code)
            LOG.error(
                "the %s process (pid %d) %s; it is started again in %g s",
                *(self.role.name, pid, how, wait_seconds),
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_seconds)

    def _judge(self, exit_code: int, lived_seconds: float) -> float:
        is_quick = lived_seconds < self._policy.healthy_seconds
        self._num_quick_deaths = self._num_quick_deaths + 1 if is_quick else 1
        self._num_failures = self._num_failures + 1 if is_own_failure(exit_code) else 0
        if self._policy.is_hopeless(self._num_failures, exit_code, was_ready=self.was_ready):
            raise ConfigError(
                f"the {self.role.name} process cannot start: it {describe_exit(exit_code)}",
                hint="The lines above say why.",
            )
        return self._policy.wait_seconds(self._num_quick_deaths)

    async def _run(self) -> tuple[int, int]:
        if self.role.hang_seconds <= 0:
            return await self._run_with(self.role.orders, None)
        heartbeat = Heartbeat(self.role.hang_seconds)
        try:
            orders = replace(self.role.orders, heartbeat=heartbeat.writing)
            return await self._run_with(orders, heartbeat)
        finally:
            heartbeat.close()

    async def _run_with(self, orders: Orders, heartbeat: Heartbeat | None) -> tuple[int, int]:
        process, writing = await self._start(orders)
        LOG.debug("the %s process has pid %d", self.role.name, process.pid)
        self._process = process
        if self._stopping.is_set():
            self._send(signal.SIGTERM)
        watch = asyncio.create_task(self._watch(heartbeat))
        try:
            return await process.wait(), process.pid
        finally:
            watch.cancel()
            self._process = None
            # While this end is open the process knows that we live.
            os.close(writing)

    async def _watch(self, heartbeat: Heartbeat | None) -> None:
        """End the process by force once its heart has stopped; it is then started again."""
        if heartbeat is None:
            return
        while not heartbeat.has_stopped():
            await asyncio.sleep(heartbeat.look_seconds)
        LOG.error(
            "the %s process (pid %d) has been blocked for more than %g s and is replaced",
            *(self.role.name, self.pid, heartbeat.max_silence_seconds),
        )
        self._send(signal.SIGKILL)

    async def _start(self, orders: Orders) -> tuple[asyncio.subprocess.Process, int]:
        """The process, and the end of its standard input that must stay open."""
        reading, writing = os.pipe()
        # The orders fit into the pipe's own memory, so this does not wait for the reader.
        os.write(writing, orders.encode())
        given = (orders.lock, orders.listener, orders.heartbeat)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self.role.module),
                stdin=reading,
                # Standard output belongs to the supervisor alone.
                stdout=_STDERR,
                pass_fds=tuple(fd for fd in given if fd is not None),
                env=child_environment(self.role.environment),
                # Ctrl-C in a terminal reaches the supervisor, which tells its children.
                process_group=0,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
            if orders.heartbeat is not None:
                os.close(orders.heartbeat)
        return process, writing

    def stop(self) -> None:
        """Ask the process to end, and start it no more."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the process by force, and start it no more."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        self._stopping.set()
        self._begun.set()
        self._send(number)

    @property
    def pid(self) -> int:
        """The process's id now; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
