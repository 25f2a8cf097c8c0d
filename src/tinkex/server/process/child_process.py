"""A child process of the supervisor: start it, restart it when it dies, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.server.process import child_entry
from tinkex.server.process.child_setup import ChildSetup
from tinkex.server.process.heartbeat import HeartbeatMonitor
from tinkex.server.process.restart_policy import (
    DRAINED_EXIT_CODE,
    RestartPolicy,
    describe_exit,
    is_own_failure,
)
from tinkex.settings import child_environment

LOG = get_logger(__name__)
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What a child process runs and how it is supervised."""

    name: str
    """The name in log lines."""
    module: str
    """The module whose `main` the process runs."""
    setup: ChildSetup
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set unless they are already set."""
    hang_seconds: float = 0.0
    """Kill and restart the process when its event loop is blocked for this time; 0 never does."""
    final_exit_codes: frozenset[int] = frozenset()
    """Do not restart the process after these exit codes."""


class ChildProcess:
    """A supervised process; its pid changes with every restart."""

    def __init__(
        self, spec: ProcessSpec, policy: RestartPolicy, *, start_immediately: bool = True
    ) -> None:
        self.spec = spec
        self.was_ready = False
        """Whether the server has been ready: from then on the process is always restarted."""
        self.num_starts = 0
        """How often the process was started."""
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None
        self._num_quick_exits = 0
        self._num_failures = 0
        self._stopping = asyncio.Event()
        self._may_start = asyncio.Event()
        if start_immediately:
            self.allow_start()

    def allow_start(self) -> None:
        """Let `supervise` start the process."""
        self._may_start.set()

    async def supervise(self) -> None:
        """Run and restart the process until `stop`; raises if it cannot start at all."""
        await self._may_start.wait()
        while not self._stopping.is_set():
            started_at = time.monotonic()
            exit_code, pid = await self._run()
            if self._stopping.is_set() or exit_code in self.spec.final_exit_codes:
                return
            wait_seconds = self._record_exit(exit_code, time.monotonic() - started_at)
            reason = describe_exit(exit_code)
            LOG.log(
                logging.INFO if exit_code == DRAINED_EXIT_CODE else logging.ERROR,
                "the %s process (pid %d) %s; restarting it in %g s",
                *(self.spec.name, pid, reason, wait_seconds),
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
                hint="The log lines above give the reason.",
            )
        return self._policy.wait_seconds(self._num_quick_exits)

    async def _run(self) -> tuple[int, int]:
        if self.spec.hang_seconds <= 0:
            return await self._run_process(self.spec.setup, None)
        heartbeat = HeartbeatMonitor(self.spec.hang_seconds)
        try:
            setup = replace(self.spec.setup, heartbeat=heartbeat.write_fd)
            return await self._run_process(setup, heartbeat)
        finally:
            heartbeat.close()

    async def _run_process(
        self, setup: ChildSetup, heartbeat: HeartbeatMonitor | None
    ) -> tuple[int, int]:
        process, stdin_fd = await self._spawn(setup)
        LOG.debug("the %s process has pid %d", self.spec.name, process.pid)
        self._process = process
        self.num_starts += 1
        if self._stopping.is_set():
            # Requested while it was started.
            self._send_signal(signal.SIGTERM)
        watch = asyncio.create_task(self._watch_heartbeat(heartbeat))
        try:
            return await process.wait(), process.pid
        finally:
            watch.cancel()
            self._process = None
            # The child exits when its standard input closes.
            os.close(stdin_fd)

    async def _watch_heartbeat(self, heartbeat: HeartbeatMonitor | None) -> None:
        """Kill the process when its heartbeats stop; `supervise` then restarts it."""
        if heartbeat is None:
            return
        while not heartbeat.has_stopped():
            await asyncio.sleep(heartbeat.poll_seconds)
        LOG.error(
            "the %s process (pid %d) has been blocked for more than %g s; replacing it",
            *(self.spec.name, self.pid, heartbeat.max_silence_seconds),
        )
        self._send_signal(signal.SIGKILL)

    async def _spawn(self, setup: ChildSetup) -> tuple[asyncio.subprocess.Process, int]:
        """Start the process; return it and the write end of its standard input."""
        read_fd, write_fd = os.pipe()
        # The setup fits into the pipe's buffer, so this does not block.
        os.write(write_fd, setup.encode())
        inherited = (setup.lock, setup.listener, setup.heartbeat)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", child_entry.__name__, self.spec.module),
                stdin=read_fd,
                # Only the supervisor writes to standard output.
                stdout=_STDERR,
                pass_fds=tuple(fd for fd in inherited if fd is not None),
                env=child_environment(self.spec.environment),
                # Ctrl-C in a terminal reaches only the supervisor, which stops its children.
                process_group=0,
            )
        except BaseException:  # also on cancellation: no process owns the pipe
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
            if setup.heartbeat is not None:
                os.close(setup.heartbeat)
        return process, write_fd

    def expect_exit(self) -> None:
        """Do not restart the process when it exits."""
        self._stopping.set()
        self._may_start.set()

    def stop(self) -> None:
        """Send SIGTERM and do not restart the process."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and do not restart the process."""
        self._terminate(signal.SIGKILL)

    def _terminate(self, number: signal.Signals) -> None:
        self.expect_exit()
        self._send_signal(number)

    @property
    def pid(self) -> int:
        """The current process id; 0 if the process is not running."""
        return self._process.pid if self._process is not None else 0

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
