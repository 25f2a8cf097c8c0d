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
from tinkex.server.process.child_setup import ChildSetup
from tinkex.server.process.heartbeat import HeartbeatMonitor
from tinkex.server.process.restart_policy import RestartPolicy, describe_exit, is_own_failure
from tinkex.settings import child_environment

LOG = get_logger(__name__)
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What a process is for."""

    name: str
    """What the log calls it."""
    module: str
    """What it runs."""
    setup: ChildSetup
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables it gets unless they are set already."""
    hang_seconds: float = 0.0
    """Replace the process when its loop has been blocked for so long; 0 never does."""


class ChildProcess:
    """One process, whichever pid it has at the moment."""

    def __init__(
        self, spec: ProcessSpec, policy: RestartPolicy, *, start_immediately: bool = True
    ) -> None:
        self.spec = spec
        self.was_ready = False
        """Set when the server has been ready once: from then on nothing is hopeless."""
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None
        self._num_quick_exits = 0
        self._num_failures = 0
        self._stopping = asyncio.Event()
        self._may_start = asyncio.Event()
        if start_immediately:
            self.allow_start()

    def allow_start(self) -> None:
        """Let `keep` start the process."""
        self._may_start.set()

    async def supervise(self) -> None:
        """Run the process again and again until `stop`; raises if it cannot even start."""
        await self._may_start.wait()
        while not self._stopping.is_set():
            started_at = time.monotonic()
            exit_code, pid = await self._run()
            if self._stopping.is_set():
                return
            wait_seconds = self._record_exit(exit_code, time.monotonic() - started_at)
            how = describe_exit(exit_code)
            LOG.error(
                "the %s process (pid %d) %s; it is started again in %g s",
                *(self.spec.name, pid, how, wait_seconds),
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_seconds)

    def _record_exit(self, exit_code: int, uptime_seconds: float) -> float:
        is_quick = uptime_seconds < self._policy.healthy_seconds
        self._num_quick_exits = self._num_quick_exits + 1 if is_quick else 1
        self._num_failures = self._num_failures + 1 if is_own_failure(exit_code) else 0
        if self._policy.is_permanent_failure(
            self._num_failures, exit_code, was_ready=self.was_ready
        ):
            raise ConfigError(
                f"the {self.spec.name} process cannot start: it {describe_exit(exit_code)}",
                hint="The lines above say why.",
            )
        return self._policy.wait_seconds(self._num_quick_exits)

    async def _run(self) -> tuple[int, int]:
        if self.spec.hang_seconds <= 0:
            return await self._run_process(self.spec.setup, None)
        heartbeat = HeartbeatMonitor(self.spec.hang_seconds)
        try:
            orders = replace(self.spec.setup, heartbeat=heartbeat.write_fd)
            return await self._run_process(orders, heartbeat)
        finally:
            heartbeat.close()

    async def _run_process(
        self, setup: ChildSetup, heartbeat: HeartbeatMonitor | None
    ) -> tuple[int, int]:
        process, writing = await self._spawn(setup)
        LOG.debug("the %s process has pid %d", self.spec.name, process.pid)
        self._process = process
        if self._stopping.is_set():
            self._send_signal(signal.SIGTERM)
        watch = asyncio.create_task(self._watch_heartbeat(heartbeat))
        try:
            return await process.wait(), process.pid
        finally:
            watch.cancel()
            self._process = None
            # While this end is open the process knows that we live.
            os.close(writing)

    async def _watch_heartbeat(self, heartbeat: HeartbeatMonitor | None) -> None:
        """End the process by force once its heart has stopped; it is then started again."""
        if heartbeat is None:
            return
        while not heartbeat.has_stopped():
            await asyncio.sleep(heartbeat.poll_seconds)
        LOG.error(
            "the %s process (pid %d) has been blocked for more than %g s and is replaced",
            *(self.spec.name, self.pid, heartbeat.max_silence_seconds),
        )
        self._send_signal(signal.SIGKILL)

    async def _spawn(self, setup: ChildSetup) -> tuple[asyncio.subprocess.Process, int]:
        """The process, and the end of its standard input that must stay open."""
        reading, writing = os.pipe()
        # The orders fit into the pipe's own memory, so this does not wait for the reader.
        os.write(writing, setup.encode())
        given = (setup.lock, setup.listener, setup.heartbeat)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self.spec.module),
                stdin=reading,
                # Standard output belongs to the supervisor alone.
                stdout=_STDERR,
                pass_fds=tuple(fd for fd in given if fd is not None),
                env=child_environment(self.spec.environment),
                # Ctrl-C in a terminal reaches the supervisor, which tells its children.
                process_group=0,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
            if setup.heartbeat is not None:
                os.close(setup.heartbeat)
        return process, writing

    def stop(self) -> None:
        """Ask the process to end, and start it no more."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """End the process by force, and start it no more."""
        self._terminate(signal.SIGKILL)

    def _terminate(self, number: signal.Signals) -> None:
        self._stopping.set()
        self._may_start.set()
        self._send_signal(number)

    @property
    def pid(self) -> int:
        """The process's id now; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
