"""A proxy that stalls some responses of a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PIECE = 65536


@dataclass(slots=True)
class Proxy:
    """Forwards everything, but stalls the response to the first request with a given word."""

    port: int
    upstream: tuple[str, int]
    word: bytes
    passed_bytes: int
    """Number of bytes forwarded before the response stalls."""
    is_stuck: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    opened: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self.upstream)
                self.opened += [client, server]
                is_marked = threading.Event()
                for work in (self.pass_up, self.pass_down):
                    arguments = (client, server, is_marked)
                    threading.Thread(target=work, args=arguments, daemon=True).start()

    def pass_up(
        self, client: socket.socket, server: socket.socket, is_marked: threading.Event
    ) -> None:
        """Forward the client's data."""
        with contextlib.suppress(OSError):
            while piece := client.recv(_PIECE):
                if self.word in piece:
                    is_marked.set()
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)

    def pass_down(
        self, client: socket.socket, server: socket.socket, is_marked: threading.Event
    ) -> None:
        """Forward the server's data until it stalls."""
        left = self.passed_bytes
        with contextlib.suppress(OSError):
            while piece := server.recv(_PIECE):
                if not is_marked.is_set():
                    client.sendall(piece)
                    continue
                client.sendall(piece[:left])
                left -= len(piece[:left])
                if left == 0:
                    self.is_stuck.set()
                    self.is_over.wait()
                    return
            client.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def stuck(url: str, word: str, passed_bytes: int = 0) -> Iterator[Proxy]:
    """Start a proxy that stalls responses to requests with this word."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        proxy = Proxy(port, (place.hostname, place.port), word.encode(), passed_bytes)
        thread = threading.Thread(target=proxy.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.is_over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for each in proxy.opened:
                each.close()
