"""Restart policy of child processes: immediately at first, then with exponential backoff."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tinkex.errors import ConfigError, TinkexError

#: Exit code of a process with invalid settings; restarting it would not help.
CONFIG_EXIT_CODE = 78
#: Exit code of a worker whose group was drained.
DRAINED_EXIT_CODE = 79
#: Exit code of a worker whose group has another worker now.
FENCED_EXIT_CODE = 80
#: Signals caused by the process itself.
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
    """Backoff and limits for restarting a process."""

    first_wait_seconds: float = 0.5
    """Wait after the second quick exit in a row; it doubles with each further one."""
    max_wait_seconds: float = 30.0
    """The longest wait."""
    healthy_seconds: float = 10.0
    """An exit after less than this uptime counts as quick."""
    max_startup_failures: int = 3
    """Number of failures in a row before the first readiness after which startup is given up."""

    def wait_seconds(self, num_quick_exits: int) -> float:
        """Seconds to wait after this many quick exits in a row."""
        if num_quick_exits <= 1:
            return 0.0
        doublings = min(num_quick_exits - 2, 30)
        return min(self.max_wait_seconds, self.first_wait_seconds * 2.0**doublings)

    def is_permanent_failure(self, num_failures: int, exit_code: int, *, was_ready: bool) -> bool:
        """Whether the process cannot start, so that restarting it is pointless."""
        if was_ready:
            return False
        return exit_code == CONFIG_EXIT_CODE or num_failures >= self.max_startup_failures


def is_own_failure(exit_code: int) -> bool:
    """Whether the process exited or crashed by itself, not by a signal from outside."""
    if exit_code == DRAINED_EXIT_CODE:
        return False
    return exit_code >= 0 or -exit_code in _CRASH_SIGNALS


def exit_code_for(error: TinkexError) -> int:
    """The exit code of a server process after an expected error."""
    return CONFIG_EXIT_CODE if isinstance(error, ConfigError) else 1


def describe_exit(exit_code: int) -> str:
    """Describe how a process ended."""
    if exit_code == DRAINED_EXIT_CODE:
        return "has handed its models over"
    if exit_code == FENCED_EXIT_CODE:
        return "was replaced by another worker of its group"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"
