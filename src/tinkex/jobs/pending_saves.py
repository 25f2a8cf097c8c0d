"""Saves whose files are uploaded in the background: their models wait, other work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tinkex.checkpoint.places import BlobsUnavailable
from tinkex.jobs.job_types import to_failed
from tinkex.jobs.result_log import ResultEntry
from tinkex.logs import get_logger

LOG = get_logger(__name__)
NUM_THREADS = 4
#: Pause between attempts while the object store is away.
RETRY_SECONDS = 0.5


class PendingSaves:
    """Uploads the files of saves, and repeats that until the object store has them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when an upload has ended."""
        self._wake = wake
        self._stop_event = threading.Event()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: dict[str, tuple[ResultEntry, Future[None]]] = {}

    @property
    def job_ids(self) -> list[str]:
        """The jobs whose files are being uploaded."""
        return list(self._pending)

    def start(self, entry: ResultEntry, upload: Callable[[], None]) -> None:
        """Upload the files of a save; `pop_finished` returns its entry afterwards."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="save")
        future = self._executor.submit(self._upload, entry.job.id, upload)
        self._pending[entry.job.id] = (entry, future)
        future.add_done_callback(lambda _: self._wake())

    def _upload(self, job_id: str, upload: Callable[[], None]) -> None:
        while True:
            try:
                upload()
                return
            except BlobsUnavailable as error:
                LOG.debug("the save %s waits for the object store: %s", job_id, error)
                if self._stop_event.wait(RETRY_SECONDS):
                    raise

    def pop_finished(self) -> list[ResultEntry]:
        """Return the saves whose files are uploaded, or cannot be."""
        finished = []
        for job_id, (entry, future) in list(self._pending.items()):
            if future.done():
                del self._pending[job_id]
                error = future.exception()
                if isinstance(error, Exception):
                    entry = entry._replace(outcome=to_failed(error, entry.job.kind))
                finished.append(entry)
        return finished

    def close(self) -> None:
        """Stop waiting for the object store; the saves run again later."""
        self._stop_event.set()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
