"""Setup of child processes: settings, inherited descriptors, threads, and exit with the parent.

The supervisor writes one line of JSON to the child's standard input and keeps the pipe open. When
the input ends, the supervisor is gone, and the child exits.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tinkex import clock
from tinkex.logs import attach_logger
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import decode_config, encode_config

#: Grace period for an orphan's clean exit.
ORPHAN_GRACE_SECONDS = 0.8
#: The interpreter's thread switch interval.
THREAD_SWITCH_SECONDS = 0.0005
_ORPHAN_EXIT_CODE = 1
_STDIN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSetup:
    """What the supervisor passes to a child process."""

    config: ServerConfig
    lock: int | None = None
    """Descriptor of the home's lock: the home stays locked while any of its processes lives."""
    listener: int | None = None
    """Descriptor of the listening socket, for API processes."""
    heartbeat: int | None = None
    """Descriptor of the pipe for heartbeats, if the supervisor monitors them."""
    group_id: str = ""
    """The group of a worker."""
    owner: str = ""
    """Identifies the starter of a worker; empty for the server of the home."""
    clock_offset: float = field(default_factory=lambda: clock.CLOCK.offset)
    """Gives all processes the same time of day, even if the wall clock is set later."""

    def encode(self) -> bytes:
        """Encode as one line of JSON."""
        config = msgspec.Raw(encode_config(self.config))
        line = {
            "config": config,
            "lock": self.lock,
            "listener": self.listener,
            "heartbeat": self.heartbeat,
            "group_id": self.group_id,
            "owner": self.owner,
            "clock_offset": self.clock_offset,
        }
        return msgspec.json.encode(line) + b"\n"


class _ChildSetupMessage(msgspec.Struct):
    config: msgspec.Raw
    lock: int | None
    listener: int | None
    heartbeat: int | None
    group_id: str
    owner: str
    clock_offset: float


def initialize_child() -> ChildSetup:
    """Read the setup, apply it to this process and arrange to exit with the supervisor."""
    # The supervisor handles Ctrl-C and decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The thread that commits must not wait long for a compute thread.
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    setup = read_child_setup()
    clock.CLOCK.adopt_offset(setup.clock_offset)
    attach_logger(setup.config.log_level)
    exit_with_parent()
    return setup


def read_child_setup() -> ChildSetup:
    """Read the setup from standard input."""
    # Unbuffered: sys.stdin would hold its lock while a thread waits for the end of the input.
    with open(_STDIN, "rb", buffering=0, closefd=False) as source:
        message = msgspec.json.decode(source.readline(), type=_ChildSetupMessage)
    for descriptor in (message.lock, message.listener, message.heartbeat):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    return ChildSetup(
        config=decode_config(message.config),
        lock=message.lock,
        listener=message.listener,
        heartbeat=message.heartbeat,
        group_id=message.group_id,
        owner=message.owner,
        clock_offset=message.clock_offset,
    )


def exit_with_parent() -> None:
    """When the supervisor is gone, send SIGTERM to this process and soon after end it by force."""
    threading.Thread(target=_wait_for_parent_exit, name="parent-watch", daemon=True).start()


def _wait_for_parent_exit() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_SECONDS)
    os._exit(_ORPHAN_EXIT_CODE)


_CGROUP = Path("/sys/fs/cgroup")
#: Measured with two busy processes on two cores: 1,000 costs nothing, 10,000 twice the time.
_SPIN_COUNT = "1000"


def worker_environment(threads: int, cores: int) -> dict[str, str]:
    """OpenMP variables for the worker; variables that the user set take precedence.

    A thread that has finished its share of a matrix product waits for the others. If it spins, it
    occupies a core that they need as soon as anything else runs on the machine: a step of small
    products took 60 times as long next to busy processes. If it sleeps, waking it takes longer
    than a small product. So it spins for some microseconds and then sleeps.
    """
    return {
        "OMP_NUM_THREADS": str(threads or cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPIN_COUNT,
    }


def count_cores(cgroup: Path = _CGROUP) -> int:
    """Number of cores that this process may use, within the CPU limit of its container."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cgroup)))


def _cgroup_cores(cgroup: Path) -> int:
    """The CPU limit of the container in cores; a huge number if there is none."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((cgroup / name).read_text() for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return 1 << 30
