"""What the supervisor tells a process that it starts, and how that process learns of its death.

Both go through the process's standard input: one line of JSON, then silence. The end of the input
means that the supervisor is gone, however it went.
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

#: How long an orphan may take to end well.
ORPHAN_GRACE_SECONDS = 0.8
#: How long a thread may keep the others from running.
THREAD_SWITCH_SECONDS = 0.0005
_ORPHAN_EXIT_CODE = 1
_STDIN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSetup:
    """Everything that a process of the server is told."""

    config: ServerConfig
    lock: int
    """The descriptor of the home's lock: a home stays taken while any process of it lives."""
    listener: int | None = None
    """The descriptor of the listening socket, for those who answer."""
    heartbeat: int | None = None
    """The descriptor of the pipe to beat through, for those who are watched."""
    clock_offset: float = field(default_factory=lambda: clock.CLOCK.offset)
    """Makes the time of day of all processes the same, whatever the wall clock says later."""

    def encode(self) -> bytes:
        """One line of JSON."""
        config = msgspec.Raw(encode_config(self.config))
        line = {
            "config": config,
            "lock": self.lock,
            "listener": self.listener,
            "heartbeat": self.heartbeat,
            "clock_offset": self.clock_offset,
        }
        return msgspec.json.encode(line) + b"\n"


class _ChildSetupMessage(msgspec.Struct):
    config: msgspec.Raw
    lock: int
    listener: int | None
    heartbeat: int | None
    clock_offset: float


def initialize_child() -> ChildSetup:
    """What every process of the server does first: hear its orders, and whom it ends with."""
    # The supervisor decides when to stop: a terminal's Ctrl-C is not ours to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The thread that commits must not wait long for one that computes.
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    orders = read_child_setup()
    clock.CLOCK.adopt_offset(orders.clock_offset)
    attach_logger(orders.config.log_level)
    exit_with_parent()
    return orders


def read_child_setup() -> ChildSetup:
    """Read the orders of the process that this is."""
    # Unbuffered: what Python's own stdin holds at the end of the program cannot be waited on.
    with open(_STDIN, "rb", buffering=0, closefd=False) as source:
        line = msgspec.json.decode(source.readline(), type=_ChildSetupMessage)
    for descriptor in (line.lock, line.listener, line.heartbeat):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    return ChildSetup(
        config=decode_config(line.config),
        lock=line.lock,
        listener=line.listener,
        heartbeat=line.heartbeat,
        clock_offset=line.clock_offset,
    )


def exit_with_parent() -> None:
    """End this process when the supervisor is gone: as if told to, and by force soon after."""
    threading.Thread(target=_wait_for_parent_exit, name="parent-watch", daemon=True).start()


def _wait_for_parent_exit() -> None:
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_SECONDS)
    os._exit(_ORPHAN_EXIT_CODE)


_CGROUP = Path("/sys/fs/cgroup")
#: Beside two busy processes on two cores, 1,000 cost nothing, and 10,000 twice the time.
_SPIN_COUNT = "1000"


def worker_environment(threads: int, cores: int) -> dict[str, str]:
    """Variables for the process that computes; they count only if its user set no others.

    A thread that is done with its share of a matrix product waits for the others. If it spins, it
    takes the core of whom it waits for as soon as anything else runs on the machine: a step of
    small products took 60 times as long beside busy processes. Asleep, it costs a wake-up, which
    takes longer than a small product does. So it spins for some microseconds, and then sleeps.
    """
    return {
        "OMP_NUM_THREADS": str(threads or cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPIN_COUNT,
    }


def count_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use; a container's share counts, not its host's cores."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cgroup)))


def _cgroup_cores(cgroup: Path) -> int:
    """How many cores a container is given; very many if nothing is said."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((cgroup / name).read_text() for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return 1 << 30
