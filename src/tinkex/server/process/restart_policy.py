"""When a process that died is started again: at once the first time, later if it keeps dying."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tinkex.errors import ConfigError, TinkexError

#: A process that could not use its settings ends so; starting it again would not help.
CONFIG_EXIT_CODE = 78
#: Signals that a process gets for what it did itself.
_CRASH_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is with a process that dies."""

    first_wait_seconds: float = 0.5
    """How long to wait after a process died at once for the second time; doubles each time."""
    max_wait_seconds: float = 30.0
    """The longest wait."""
    healthy_seconds: float = 10.0
    """A process that lived so long did not die at once."""
    max_startup_failures: int = 3
    """So many failures in a row before the server was ever ready mean that it cannot start."""

    def wait_seconds(self, num_quick_exits: int) -> float:
        """How long to wait after so many quick deaths in a row."""
        if num_quick_exits <= 1:
            return 0.0
        doublings = min(num_quick_exits - 2, 30)
        return min(self.max_wait_seconds, self.first_wait_seconds * 2.0**doublings)

    def is_permanent_failure(self, num_failures: int, exit_code: int, *, was_ready: bool) -> bool:
        """Whether starting the process again makes no sense after so many failures of its own."""
        if was_ready:
            return False
        return exit_code == CONFIG_EXIT_CODE or num_failures >= self.max_startup_failures


def is_own_failure(exit_code: int) -> bool:
    """Whether a process ended by itself; a signal from outside says nothing about the process."""
    return exit_code >= 0 or -exit_code in _CRASH_SIGNALS


def exit_code_for(error: TinkexError) -> int:
    """How a process of the server ends after an error that it understands."""
    return CONFIG_EXIT_CODE if isinstance(error, ConfigError) else 1


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
