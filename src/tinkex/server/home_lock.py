"""One server per home: a lock that the kernel gives back, however its holders end."""

from __future__ import annotations

import fcntl
import os
import time

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.presence import holder_in, is_alive, read_state

#: How long the processes of a server that was killed may take to notice.
AFTERLIFE_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class HomeLock:
    """A home that is ours until every process that holds the descriptor is gone."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, home: Home) -> HomeLock:
        """Take a home, or say who has it."""
        home.make()
        descriptor = os.open(home.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor, home)
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return cls(descriptor)

    def is_in(self, home: Home) -> bool:
        """Whether the file that we locked is still the home's: not removed, not replaced."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), home.server_lock.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # A disk that does not answer says nothing about the file.
            return True

    def release(self) -> None:
        """Give the home back, as far as this process is concerned."""
        os.close(self.descriptor)


def _lock(descriptor: int, home: Home) -> None:
    ends_at = time.monotonic() + AFTERLIFE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_in(os.pread(descriptor, 32, 0))
            # The children of a killed supervisor hold the lock until they notice.
            if time.monotonic() > ends_at or (holder is not None and is_alive(holder)):
                raise _taken(home, holder) from None
            time.sleep(_LOOK_SECONDS)
        else:
            return


def _taken(home: Home, holder: int | None) -> ConfigError:
    state = read_state(home)
    where = f" at {state.url}" if state is not None and state.pid == holder else ""
    who = f" with pid {holder}" if holder is not None else ""
    return ConfigError(
        f"a server{who} runs in {home.root} already{where}",
        hint="Use that one, stop it with `tinkex serve stop`, or pass another --home.",
    )
