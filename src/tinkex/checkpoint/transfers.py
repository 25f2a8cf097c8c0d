"""Downloads in the background, for callers that must not wait for an object store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

from tinkex.checkpoint.places import BlobPending

T = TypeVar("T")
NUM_THREADS = 4
#: Memory of downloads that were started early and not taken yet.
MAX_PREFETCHED_BYTES = 128 * 2**20


class BlobTransfers:
    """Runs downloads on a few threads, each once per key; a result is taken once."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called when a download has ended."""
        self._wake = wake
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="blobs")
        self._lock = threading.Lock()
        self._futures: OrderedDict[str, tuple[Future[object], int]] = OrderedDict()

    def take(self, key: str, download: Callable[[], T]) -> T:
        """Return the result of a download; raises BlobPending until it has ended.

        An error of the download is raised once; the next call starts it again.
        """
        with self._lock:
            future, _ = self._futures.get(key) or (self._start(key, download, 0), 0)
            if not future.done():
                raise BlobPending(f"{key} is being downloaded")
            del self._futures[key]
        return cast(T, future.result())

    def prefetch(self, key: str, download: Callable[[], object], num_bytes: int) -> None:
        """Start a download whose result is needed soon, if there is memory for it."""
        with self._lock:
            if key in self._futures:
                return
            total = num_bytes + sum(size for _, size in self._futures.values())
            for old, (future, size) in list(self._futures.items()):
                if total <= MAX_PREFETCHED_BYTES:
                    break
                if future.done():
                    # Its job was cancelled or moved, or it is downloaded again.
                    del self._futures[old]
                    total -= size
            if total <= MAX_PREFETCHED_BYTES:
                self._start(key, download, num_bytes)

    def _start(self, key: str, download: Callable[[], object], num_bytes: int) -> Future[object]:
        future: Future[object] = self._executor.submit(download)
        self._futures[key] = (future, num_bytes)
        future.add_done_callback(lambda _: self._wake())
        return future

    def close(self) -> None:
        """Stop; downloads that have not begun are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
