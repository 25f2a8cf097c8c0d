"""User code that wants to be told: run in order, on a thread where it delays nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinkex.logs import get_logger

logger = get_logger(__name__)


class HookThread:
    """Calls hooks one after the other; what they raise is logged."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def run(self, action: Callable[[], Any]) -> None:
        """Call it soon, after what came before it."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinkex-hooks")
        try:
            self._executor.submit(_guarded, action)
        except RuntimeError as error:
            # After stop() and at interpreter exit nobody listens any more; work goes on.
            logger.debug("A hook was not called: %s", error)

    def stop(self) -> None:
        """Call what is waiting, then nothing more; returns at once."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def _guarded(action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception:
        logger.warning("A hook raised", exc_info=True)
