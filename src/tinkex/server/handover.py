"""What the supervisor tells a process that it starts, and how that process learns of its death.

Both go through the process's standard input: one line of JSON, then silence. The end of the input
means that the supervisor is gone, however it went.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

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
