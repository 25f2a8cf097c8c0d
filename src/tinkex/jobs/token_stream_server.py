"""The worker's side of token streams: a socket at which API processes watch running samples.

A thread accepts connections and reads watches. The thread of the engine sends: it never waits, and
what does not fit into the buffer of a connection is dropped, which the reader notices by offsets.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tinkex.engine.protocol import SampleProgress
from tinkex.jobs.token_stream_messages import (
    MAX_FRAME_BYTES,
    MAX_JOB_ID_CHARS,
    Challenge,
    Finished,
    FrameDecoder,
    Handshake,
    InvalidFrame,
    Message,
    Progress,
    Proof,
    Started,
    Unwatch,
    Watch,
    encode_frame,
)
from tinkex.logs import get_logger

LOG = get_logger(__name__)
#: Bytes that wait for one connection; what exceeds them is dropped.
MAX_BUFFER_BYTES: Final = 1 << 20
#: How long a watch of a job that this worker does not run is remembered.
WATCH_SECONDS: Final = 60.0
#: Watched jobs of all connections.
MAX_WATCHES: Final = 10_000
MAX_CONNECTIONS: Final = 256
#: A connection without a valid proof is closed after this time.
HANDSHAKE_SECONDS: Final = 5.0
_RECEIVE_BYTES = 64 * 1024
_TICK_SECONDS = 1.0


class _Connection:
    """One API process."""

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self.socket = sock
        self.handshake = handshake
        self.decoder = FrameDecoder()
        self.output = bytearray()
        self.is_trusted = False
        self.is_broken = False
        self.opened_at = time.monotonic()

    def enqueue(self, frame: bytes) -> bool:
        """Send a frame without waiting; returns False if there is no space for it."""
        if self.is_broken or len(self.output) + len(frame) > MAX_BUFFER_BYTES:
            return False
        is_idle = not self.output
        self.output += frame
        if is_idle:
            self.flush()
        return True

    def flush(self) -> None:
        """Send as much of the buffer as possible without waiting."""
        try:
            while self.output:
                del self.output[: self.socket.send(self.output)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_broken = True


class _WatchedJob:
    """The connections that watch one job."""

    __slots__ = ("connections", "expires_at", "is_running")

    def __init__(self) -> None:
        self.connections: set[_Connection] = set()
        self.is_running = False
        self.expires_at = 0.0


class WatchChanges(NamedTuple):
    """Jobs whose watches have changed."""

    watched: Sequence[str]
    unwatched: Sequence[str]


class TokenStreamServer:
    """Sends the tokens of running samples to the API processes that watch them."""

    def __init__(self, secret: bytes, host: str = "127.0.0.1") -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """Where API processes connect."""
        self.is_active = False
        """Whether any job is watched. Read by the engine's thread at every step."""
        self._jobs: dict[str, _WatchedJob] = {}
        self._changed: dict[str, bool] = {}
        """Whether the job is watched, of jobs whose watches changed since `take_changes`."""
        self._num_dropped = 0
        self._next_expiry_at = 0.0
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="token-streams", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """The number of frames that were dropped because a reader is slow."""
        return self._num_dropped

    # --- called by the engine's thread -----------------------------------------------------------
    def start_job(self, job_id: str, attempt: int) -> bool:
        """Announce that a job runs here; returns whether it is watched."""
        with self._lock:
            watched = self._jobs.get(job_id)
            if watched is None:
                return False
            watched.is_running = True
            self._send(Started(job_id, attempt), watched.connections)
            return True

    def finish_job(self, job_id: str) -> None:
        """Announce that a job does not run here any more, and forget its watches."""
        with self._lock:
            watched = self._jobs.pop(job_id, None)
            if watched is not None:
                self._send(Finished(job_id), watched.connections)
            self._changed.pop(job_id, None)
            self._update_active()

    def take_changes(self) -> WatchChanges:
        """Return the jobs that were watched or unwatched since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            self._update_active()
        watched = [job_id for job_id, is_watched in changed.items() if is_watched]
        return WatchChanges(watched, [job_id for job_id in changed if not changed[job_id]])

    def send_progress(self, parts: Iterable[SampleProgress]) -> None:
        """Send new tokens to all connections that watch their jobs; drops what does not fit."""
        with self._lock:
            by_connection: dict[_Connection, list[SampleProgress]] = {}
            for part in parts:
                watched = self._jobs.get(part.job_id)
                for connection in watched.connections if watched is not None else ():
                    by_connection.setdefault(connection, []).append(part)
            for connection, watched_parts in by_connection.items():
                self._enqueue(connection, encode_frame([Progress(watched_parts)]))

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
        self._wake()
        self._thread.join()

    # --- with the lock held ----------------------------------------------------------------------
    def _send(self, message: Message, connections: Iterable[_Connection]) -> None:
        frame = encode_frame([message])
        for connection in connections:
            self._enqueue(connection, frame)

    def _enqueue(self, connection: _Connection, frame: bytes) -> None:
        if not connection.enqueue(frame):
            self._num_dropped += 1
        if connection.output or connection.is_broken:
            self._wake()

    def _update_active(self) -> None:
        self.is_active = bool(self._jobs or self._changed)

    def _watch(self, connection: _Connection, job_id: str) -> None:
        watched = self._jobs.get(job_id)
        if watched is None:
            if len(self._jobs) >= MAX_WATCHES or len(job_id) > MAX_JOB_ID_CHARS:
                return
            watched = self._jobs[job_id] = _WatchedJob()
        watched.connections.add(connection)
        watched.expires_at = time.monotonic() + WATCH_SECONDS
        self._changed[job_id] = True
        self._update_active()

    def _unwatch(self, connection: _Connection, job_id: str) -> None:
        watched = self._jobs.get(job_id)
        if watched is None:
            return
        watched.connections.discard(connection)
        if not watched.connections:
            del self._jobs[job_id]
            self._changed[job_id] = False
            self._update_active()

    # --- the thread of the sockets ---------------------------------------------------------------
    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, so that it wakes anyway; or closed
            self._wake_sender.send(b".")

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, events in self._selector.select(_TICK_SECONDS):
                    self._handle(key, events)
                self._tidy()
        finally:
            self._release()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wake_receiver:
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(_RECEIVE_BYTES)
        elif events & selectors.EVENT_READ:
            self._read(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the other side is gone already, or there are no descriptors
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock, Handshake(self._secret))
        with self._lock:
            self._connections.add(connection)
            connection.enqueue(encode_frame([Challenge(connection.handshake.nonce)]))
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_RECEIVE_BYTES)
            messages = connection.decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, InvalidFrame):
            data, messages = b"", []
        with self._lock:
            connection.is_broken = connection.is_broken or not data
            try:
                for message in messages:
                    self._receive(connection, message)
            except InvalidFrame as error:
                LOG.debug("a connection for token streams was refused: %s", error.message)
                connection.is_broken = True

    def _receive(self, connection: _Connection, message: Message) -> None:
        match message:
            case Proof() if not connection.is_trusted:
                handshake = connection.handshake
                handshake.check("api", message.nonce, message.signature)
                connection.is_trusted = True
                connection.decoder.max_bytes = MAX_FRAME_BYTES
                signature = handshake.sign("worker", message.nonce)
                connection.enqueue(encode_frame([Proof(b"", signature)]))
            case Watch() if connection.is_trusted:
                self._watch(connection, message.job_id)
            case Unwatch() if connection.is_trusted:
                self._unwatch(connection, message.job_id)
            case _:
                raise InvalidFrame("an unexpected message")

    def _tidy(self) -> None:
        """Flush, close broken connections, and forget old watches."""
        now = time.monotonic()
        with self._lock:
            for connection in list(self._connections):
                connection.flush()
                is_late = now - connection.opened_at > HANDSHAKE_SECONDS
                if connection.is_broken or (is_late and not connection.is_trusted):
                    self._close_connection(connection)
                    continue
                wanted = selectors.EVENT_READ
                if connection.output:
                    wanted |= selectors.EVENT_WRITE
                self._selector.modify(connection.socket, wanted, connection)
            if now >= self._next_expiry_at:
                self._next_expiry_at = now + _TICK_SECONDS
                self._forget_expired(now)

    def _forget_expired(self, now: float) -> None:
        for job_id, watched in list(self._jobs.items()):
            if not watched.is_running and watched.expires_at < now:
                del self._jobs[job_id]
        self._update_active()

    def _close_connection(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        for job_id in [key for key, job in self._jobs.items() if connection in job.connections]:
            self._unwatch(connection, job_id)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _release(self) -> None:
        with self._lock:
            for connection in list(self._connections):
                self._close_connection(connection)
        self._selector.close()
        for each in (self._listener, self._wake_receiver, self._wake_sender):
            each.close()
