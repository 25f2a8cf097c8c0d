"""Sends the metrics of steps to the server; training neither waits for it nor fails with it."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Mapping
from typing import Any

from tinkex.client.future import APIFuture
from tinkex.client.service import ServiceClient
from tinkex.errors import TinkexError
from tinkex.logs import get_logger

logger = get_logger(__name__)
#: Reports that may be on their way at once.
MAX_PENDING = 16
_DRAIN_SECONDS = 10.0


class MetricsReporter:
    """Reports metrics in the background until the server refuses them."""

    def __init__(self, service: ServiceClient) -> None:
        self._service = service
        self._pending: deque[APIFuture[Any]] = deque()
        self._is_refused = False

    def report(self, run_id: str, seq_id: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of one optimizer step; servers other than tinkex refuse the first."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_PENDING):
            self._finish(self._pending.popleft())
        if not self._is_refused:
            client = self._service.rest_client()
            self._pending.append(client.report_run_metrics(run_id, seq_id, metrics))

    def drain(self) -> None:
        """Wait for the reports that are on their way."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, future: APIFuture[Any]) -> None:
        try:
            future.result(_DRAIN_SECONDS)
        except (TinkexError, concurrent.futures.TimeoutError, TimeoutError) as error:
            self._is_refused = True
            logger.info("The server does not take metrics of this run: %s", error)
