"""Loggers of this package, and an optional console handler.

No handler is attached by default. Python then prints warnings to stderr, so that important messages
appear without any configuration.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import TextIO

ROOT = "tinkex"
#: Maximum number of remembered keys.
MAX_KEYS = 1000
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module."""
    return logging.getLogger(name)


def attach_logger(level: str = "info", stream: TextIO | None = None) -> logging.Handler:
    """Log to stderr (or `stream`); returns the handler for detach_logger."""
    if level.lower() not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger(ROOT)
    logger.addHandler(handler)
    logger.setLevel(LEVELS[level.lower()])
    return handler


@functools.cache
def attach_once(level: str) -> logging.Handler:
    """Log to stderr; repeated calls have no effect."""
    return attach_logger(level)


def detach_logger(handler: logging.Handler) -> None:
    """Remove a handler of attach_logger."""
    logging.getLogger(ROOT).removeHandler(handler)


class OncePerMinute:
    """Rate limit for log messages: one per key and interval."""

    def __init__(self, interval_seconds: float = 60.0) -> None:
        self._interval_seconds = interval_seconds
        self._last: dict[object, float] = {}

    def allows(self, key: object, now: float | None = None) -> bool:
        """Return True if no message with this key was allowed during the interval."""
        now = time.monotonic() if now is None else now
        last = self._last.get(key)
        if last is not None and now - last < self._interval_seconds:
            return False
        if len(self._last) >= MAX_KEYS:
            self._last = {k: t for k, t in self._last.items() if now - t < self._interval_seconds}
        self._last[key] = now
        return True
