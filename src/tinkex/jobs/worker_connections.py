"""Connections of an API process to the token streams of all live workers.

They are opened with the first watched job, shared by all, and closed when none was watched for a
while. A worker that starts meanwhile is found in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeAlias

from tinkex import clock
from tinkex.errors import StoreError
from tinkex.jobs.token_stream_messages import (
    MAX_FRAME_BYTES,
    Challenge,
    FrameDecoder,
    Handshake,
    InvalidFrame,
    Message,
    Proof,
    Unwatch,
    Watch,
    encode_frame,
)
from tinkex.jobs.wakeup import ALIVE_SECONDS
from tinkex.logs import get_logger
from tinkex.store import coordination
from tinkex.store.database import Database
from tinkex.store.records import ProcessRecord
from tinkex.system.addresses import is_loopback, network_id

LOG = get_logger(__name__)
#: How often workers are looked up while jobs are watched.
DISCOVERY_SECONDS: Final = 1.0
#: Connections are closed after this time without a watched job.
IDLE_SECONDS: Final = 60.0
#: Watches of jobs that no worker runs are repeated, because workers forget them after a minute.
REPEAT_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 5.0
_RECEIVE_BYTES = 64 * 1024

Receive: TypeAlias = Callable[[object, Message], None]
"""Called with the connection and a message."""


class WorkerConnections:
    """One connection per worker; all methods are called on one event loop."""

    def __init__(
        self,
        database: Database,
        secret: bytes,
        receive: Receive,
        on_lost: Callable[[object], None],
        list_unserved: Callable[[], list[str]],
        count_open: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_lost` is called with a closed connection; `list_unserved` returns waiting jobs."""
        self._database = database
        self._secret = secret
        self._receive = receive
        self._on_lost = on_lost
        self._list_unserved = list_unserved
        self._count_open = count_open
        self._refused: set[str] = set()
        """Workers that did not follow the protocol."""
        self._watched: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The tasks of connections by process id, also of those that are being opened."""
        self._writers: dict[str, asyncio.StreamWriter] = {}
        """The open connections by process id."""
        self._maintenance: asyncio.Task[None] | None = None
        self._idle_since = 0.0
        self._next_repeat_at = 0.0

    @property
    def num_open(self) -> int:
        """The number of open connections."""
        return len(self._writers)

    def watch(self, job_id: str) -> None:
        """Receive the messages about a job from all workers."""
        self._watched.add(job_id)
        self._send_all(Watch(job_id))
        if self._maintenance is None or self._maintenance.done():
            self._maintenance = asyncio.create_task(self._maintain())

    def unwatch(self, job_id: str) -> None:
        """Stop receiving the messages about a job."""
        self._watched.discard(job_id)
        self._send_all(Unwatch(job_id))
        self._idle_since = time.monotonic()

    async def close(self) -> None:
        """Close all connections."""
        tasks = [*self._tasks.values(), *([self._maintenance] if self._maintenance else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_all(self, message: Message) -> None:
        frame = encode_frame([message])
        for writer in self._writers.values():
            writer.write(frame)

    # --- which workers ---------------------------------------------------------------------------
    async def _maintain(self) -> None:
        """Connect to new workers while jobs are watched; ends when none was for a while."""
        while self._watched or time.monotonic() - self._idle_since < IDLE_SECONDS:
            if self._watched:
                await self._connect_new()
                self._repeat_watches()
            await asyncio.sleep(DISCOVERY_SECONDS)
        for task in self._tasks.values():
            task.cancel()

    async def _connect_new(self) -> None:
        try:
            workers = await asyncio.to_thread(self._list_workers)
        except StoreError as error:
            LOG.warning("cannot look up workers: %s", error.message)
            return
        for worker in workers:
            if worker.id not in self._tasks:
                self._tasks[worker.id] = asyncio.create_task(self._serve(worker))

    def _list_workers(self) -> list[ProcessRecord]:
        since = clock.now() - ALIVE_SECONDS
        alive = self._database.read(
            lambda db: coordination.list_alive_processes(db, "worker", since=since)
        )
        return [worker for worker in alive if is_reachable(worker, network_id())]

    def _repeat_watches(self) -> None:
        now = time.monotonic()
        if now >= self._next_repeat_at:
            self._next_repeat_at = now + REPEAT_SECONDS
            for job_id in self._list_unserved():
                self._send_all(Watch(job_id))

    # --- one connection --------------------------------------------------------------------------
    async def _serve(self, worker: ProcessRecord) -> None:
        """Receive the messages of a worker until the connection is closed."""
        source = object()
        try:
            async with _connect(worker.stream_address) as (reader, writer):
                decoder = await asyncio.wait_for(
                    _authenticate(reader, writer, self._secret), CONNECT_SECONDS
                )
                self._writers[worker.id] = writer
                self._count_open(1)
                writer.write(encode_frame([Watch(job_id) for job_id in self._watched]))
                async for message in _read_messages(reader, decoder):
                    self._receive(source, message)
        except (OSError, TimeoutError) as error:
            LOG.debug("no token streams from worker %s: %s", worker.id, error)
        except InvalidFrame as error:
            self._log_refusal(worker, error)
        finally:
            if self._writers.pop(worker.id, None) is not None:
                self._count_open(-1)
            self._tasks.pop(worker.id, None)
            self._on_lost(source)

    def _log_refusal(self, worker: ProcessRecord, error: InvalidFrame) -> None:
        """Log once per worker that it does not follow the protocol."""
        if worker.id not in self._refused:
            self._refused.add(worker.id)
            LOG.warning("no token streams from worker %s: %s", worker.id, error.message)


@contextlib.asynccontextmanager
async def _connect(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(host, int(port)), CONNECT_SECONDS
    )
    try:
        yield reader, writer
    finally:
        writer.close()


async def _authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> FrameDecoder:
    """Prove that both sides know the secret; raises InvalidFrame or OSError."""
    decoder, handshake = FrameDecoder(), Handshake(secret)
    messages = _read_messages(reader, decoder)
    challenge = await anext(messages, None)
    if not isinstance(challenge, Challenge):
        raise InvalidFrame("a worker sent no challenge")
    signature = handshake.sign("api", challenge.nonce)
    writer.write(encode_frame([Proof(handshake.nonce, signature)]))
    proof = await anext(messages, None)
    if not isinstance(proof, Proof):
        raise InvalidFrame("a worker sent no proof")
    handshake.check("worker", challenge.nonce, proof.signature)
    decoder.max_bytes = MAX_FRAME_BYTES
    return decoder


async def _read_messages(
    reader: asyncio.StreamReader, decoder: FrameDecoder
) -> AsyncIterator[Message]:
    """Yield the messages of a worker until it closes the connection."""
    while data := await reader.read(_RECEIVE_BYTES):
        for message in decoder.feed(data):
            yield message


def is_reachable(worker: ProcessRecord, network: str) -> bool:
    """Whether a worker has token streams that a process of this network can reach."""
    host = worker.stream_address.rpartition(":")[0]
    return bool(host) and (not is_loopback(host) or worker.network in {"", network})
