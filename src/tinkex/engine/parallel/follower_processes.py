"""Followers on this machine, as child processes of the leader."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from tinkex.engine.parallel.rendezvous import Address
from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.settings import child_environment

LOG = get_logger(__name__)
#: Time for followers to end after they were asked to.
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_STDERR = 2


class FollowerProcesses:
    """Child processes that compute for this one; they end with it."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    @classmethod
    def start(cls, address: Address, num_ranks: int) -> Self:
        """Start all followers."""
        level = logging.getLevelName(LOG.getEffectiveLevel()).lower()
        processes = []
        for rank in range(1, num_ranks):
            command = [sys.executable, "-P", "-m", "tinkex.engine.parallel.follower"]
            options = [f"--rank={rank}", f"--rendezvous={address}", f"--local-rank={rank}"]
            process = subprocess.Popen(
                [*command, *options, f"--log-level={level}", "--exit-with-parent"],
                # A follower ends when its standard input closes, with this process at the latest.
                stdin=subprocess.PIPE,
                # Only the supervisor writes to standard output.
                stdout=_STDERR,
                env=child_environment({}),
                process_group=0,
            )
            processes.append(process)
        return cls(processes)

    def check(self) -> None:
        """Raise ConfigError if a follower has ended."""
        if reason := self.describe_exit():
            raise ConfigError(reason, hint="The log lines above give the reason.")

    def describe_exit(self, wait_seconds: float = 0.0) -> str:
        """How a follower has ended; empty if none has, as far as is known.

        The connections of a killed process close a moment before it can be waited for.
        """
        deadline = time.monotonic() + wait_seconds
        while not (reason := self._describe_exit()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return reason

    def _describe_exit(self) -> str:
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                how = f"exited with code {code}" if code >= 0 else f"was killed by {_name(-code)}"
                return f"rank {rank} (pid {process.pid}) {how}"
        return ""

    def stop(self, *, is_killed: bool = False) -> None:
        """Wait a few seconds for the followers to end, then kill them."""
        deadline = time.monotonic() + (0.0 if is_killed else _STOP_SECONDS)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the followers."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
