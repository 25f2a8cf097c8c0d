"""User code that wants to be told: run in order, on a thread where it delays nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinkex.logs import OncePerMinute, get_logger

logger = get_logger(__name__)

#: More than this many calls behind, a hook is too slow to be told of everything.
MAX_PENDING_CALLBACKS = 10_000


class CallbackThread:
    """Calls hooks one after the other; what they raise is logged."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinkex-hooks")
        self._num_pending = 0
        self._log_throttle = OncePerMinute()

    def submit(self, callback: Callable[[], Any]) -> None:
        """Call it soon, after what came before it."""
        if self._num_pending >= MAX_PENDING_CALLBACKS:
            if self._log_throttle.allows("full"):
                logger.warning("Hooks are slower than what they are told of; some are not called")
            return
        self._num_pending += 1
        try:
            self._executor.submit(self._call, callback)
        except RuntimeError as error:
            # After stop() and at interpreter exit nobody listens any more; work goes on.
            logger.debug("A hook was not called: %s", error)

    def stop(self) -> None:
        """Call what is waiting, then nothing more; returns at once."""
        self._executor.shutdown(wait=False)

    def _call(self, callback: Callable[[], Any]) -> None:
        self._num_pending -= 1
        try:
            callback()
        except Exception:
            logger.warning("A hook raised", exc_info=True)
