"""The API process's side of token streams: follow samples while workers compute them.

What workers send is only a preview. A stream ends when the result of its job is in the store, and
whatever was lost on the way is taken from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

from tinkex.engine.protocol import SampleProgress
from tinkex.errors import InternalServerError
from tinkex.jobs.future_waiters import FutureWaiters
from tinkex.jobs.queue import JobQueue
from tinkex.jobs.stream_observer import StreamObserver
from tinkex.jobs.streamed_tokens import (
    StoredSequence,
    StreamDiverged,
    StreamedTokens,
    join_progress,
)
from tinkex.jobs.token_stream_messages import Message, Progress, Started
from tinkex.jobs.worker_connections import WorkerConnections
from tinkex.store.database import Database

#: Tokens of a stream that wait for a slow client; what exceeds them is taken from the store.
MAX_PENDING_TOKENS: Final = 16_384


class ServerStopping(InternalServerError):
    """The server stops before the sample is finished."""

    status_code = 503


class TokenStream:
    """The tokens of one sample; iterate over it once, after its job was submitted."""

    def __init__(self, streams: TokenStreams, job_id: str, seconds: float | None = None) -> None:
        self.job_id = job_id
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._streams = streams
        self._received = StreamedTokens(job_id)
        self._pending: dict[int, list[SampleProgress]] = {}
        """What was not yielded yet, by sequence."""
        self._num_pending_tokens = 0
        self._failure: StreamDiverged | None = None
        self._wakeup = asyncio.Event()
        self._is_opened = False
        self._must_check = True
        """Whether the job may have finished since the last look into the store."""
        self._is_over = False

    @property
    def needs_source(self) -> bool:
        """Whether no worker is known that sends its tokens."""
        return not self._received.has_source

    async def __aiter__(self) -> AsyncGenerator[SampleProgress, None]:
        """Yield new tokens until the result is in the store; what was lost is in `rest`.

        Raises StreamDiverged if the sample started again and drew other tokens, ServerStopping if
        the server stops.
        """
        streams = self._streams
        self._is_opened = True
        with (
            streams.open(self),
            streams.waiters.listen(self.job_id, self._check_soon),
            streams.observer.observe_stream() as observation,
            self._wake_at_end(),
        ):
            while await self._wait_for_tokens():
                observation.count_tokens()
                yield self._take_next()

    def _take_next(self) -> SampleProgress:
        """Take what has arrived of one sequence: several steps if the reader is slower."""
        progress = join_progress(self._pending.pop(next(iter(self._pending))))
        self._num_pending_tokens -= len(progress.tokens)
        return progress

    async def _wait_for_tokens(self) -> bool:
        """Wait for tokens; returns False if there will be none."""
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                return False
            if self._must_check:
                self._must_check = False
                self._is_over = await self._check_end()
                continue
            await self._wakeup.wait()
            self._wakeup.clear()
        return True

    async def _check_end(self) -> bool:
        # Wake-up messages are not authenticated, so the store decides.
        if await self._streams.is_finished(self.job_id):
            return True
        if self._streams.waiters.is_closing:
            raise ServerStopping("the server stops; send the request again")
        return self._ends_at is not None and time.monotonic() >= self._ends_at

    def _check_soon(self) -> None:
        self._must_check = True
        self._wakeup.set()

    @contextlib.contextmanager
    def _wake_at_end(self) -> Iterator[None]:
        if self._ends_at is None:
            yield
            return
        seconds = max(0.0, self._ends_at - time.monotonic())
        timer = asyncio.get_running_loop().call_later(seconds, self._check_soon)
        try:
            yield
        finally:
            timer.cancel()

    def rest(self, sequences: Sequence[StoredSequence]) -> list[SampleProgress]:
        """Return what was not yielded of the stored result; raises StreamDiverged if it differs."""
        if self._is_opened and not self._received.num_tokens:
            self._streams.observer.count_unstreamed()
        return self._received.rest(sequences)

    # --- called on the event loop when messages arrive -------------------------------------------
    def start(self, source: object, attempt: int) -> None:
        """A worker sends the sample from its first token."""
        self._received.start(source, attempt)

    def lose_source(self, source: object) -> None:
        """The connection to a worker is closed."""
        self._received.lose_source(source)

    def add(self, source: object, progress: SampleProgress) -> None:
        """Add new tokens; drops them if the client is too slow."""
        if self._num_pending_tokens + len(progress.tokens) > MAX_PENDING_TOKENS:
            self._received.skip()
            return
        try:
            new = self._received.accept(source, progress)
        except StreamDiverged as error:
            self._failure = error
            new = None
        if new is not None:
            self._pending.setdefault(new.sequence, []).append(new)
            self._num_pending_tokens += len(new.tokens)
        if new is not None or self._failure is not None:
            self._wakeup.set()


class TokenStreams:
    """All token streams of an API process."""

    def __init__(
        self,
        database: Database,
        queue: JobQueue,
        waiters: FutureWaiters,
        secret: bytes,
        *,
        observer: StreamObserver | None = None,
    ) -> None:
        self.waiters = waiters
        self.observer = observer or StreamObserver()
        self._queue = queue
        self._by_job: dict[str, set[TokenStream]] = {}
        self._connections = WorkerConnections(
            database,
            secret,
            self._receive,
            self._lose_source,
            self._list_unserved,
            self.observer.count_connections,
        )

    @property
    def num_open(self) -> int:
        """The number of streams."""
        return sum(map(len, self._by_job.values()))

    @property
    def num_connections(self) -> int:
        """The number of connections to workers."""
        return self._connections.num_open

    def follow(self, job_id: str, seconds: float | None = None) -> TokenStream:
        """Return the tokens of a submitted sample, as they are computed.

        After `seconds` the stream ends also if the sample is not finished.
        """
        return TokenStream(self, job_id, seconds)

    async def is_finished(self, job_id: str) -> bool:
        """Whether the result of a job is in the store."""
        return bool(await asyncio.to_thread(self._queue.list_finished, [job_id]))

    @contextlib.contextmanager
    def open(self, stream: TokenStream) -> Iterator[None]:
        """Receive the messages about a stream's job until the block ends."""
        job_id = stream.job_id
        self._by_job.setdefault(job_id, set()).add(stream)
        self._connections.watch(job_id)
        try:
            yield
        finally:
            streams = self._by_job[job_id]
            streams.discard(stream)
            if not streams:
                del self._by_job[job_id]
                self._connections.unwatch(job_id)

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    def _receive(self, source: object, message: Message) -> None:
        if isinstance(message, Progress):
            for part in message.parts:
                for stream in self._by_job.get(part.job_id, ()):
                    stream.add(source, part)
        elif isinstance(message, Started):
            for stream in self._by_job.get(message.job_id, ()):
                stream.start(source, message.attempt)

    def _lose_source(self, source: object) -> None:
        for streams in self._by_job.values():
            for stream in streams:
                stream.lose_source(source)

    def _list_unserved(self) -> list[str]:
        """The jobs of streams whose tokens no worker sends."""
        return [
            job_id
            for job_id, streams in self._by_job.items()
            if any(stream.needs_source for stream in streams)
        ]
