"""A follower process of a group with several ranks, on a node of a cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

from tinkex.logs import get_logger
from tinkex.settings import child_environment

LOG = get_logger(__name__)
_STDERR = 2
#: Wait after the end of a follower: its leader, which ended too, must start first.
_WAIT_SECONDS = 1.0


class HostedFollower:
    """Runs the process of one rank, and starts it again when its leader does."""

    def __init__(self, rank: int, num_threads: int, find_leader: Callable[[], str]) -> None:
        """`find_leader` waits for the leader and returns its rendezvous."""
        self._rank = rank
        self._num_threads = num_threads
        self._find_leader = find_leader
        self._stop_event = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="follower", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id; 0 if the process does not run now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def stop(self) -> None:
        """End the process."""
        self._stop_event.set()
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        while not self._stop_event.is_set():
            address = self._find_leader()
            if address:
                code = self._run_process(address)
                LOG.info("rank %d has ended with code %d", self._rank, code)
            self._stop_event.wait(_WAIT_SECONDS)

    def _run_process(self, address: str) -> int:
        options = [f"--rank={self._rank}", f"--rendezvous={address}", "--exit-with-parent"]
        with subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "tinkex.engine.parallel.follower", *options),
                f"--threads={self._num_threads}",
            ],
            # A follower ends when its standard input closes, with this process at the latest.
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            env=child_environment({}),
            process_group=0,
        ) as process:
            self._process = process
            return process.wait()
