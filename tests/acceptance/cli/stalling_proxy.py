"""A road to a server on which some answers get stuck."""

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
    """Passes everything on; the answer to the first request with a word in it gets stuck."""

    port: int
    upstream: tuple[str, int]
    word: bytes
    passed_bytes: int
    """So much of that answer is passed on before."""
    is_stuck: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    opened: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, listener: socket.socket) -> None:
        """Take connections until the listener is closed."""
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
        """What the client says."""
        with contextlib.suppress(OSError):
            while piece := client.recv(_PIECE):
                if self.word in piece:
                    is_marked.set()
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)

    def pass_down(
        self, client: socket.socket, server: socket.socket, is_marked: threading.Event
    ) -> None:
        """What the server says, as far as it is let through."""
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
    """A road to this server on which answers to requests with this word get stuck."""
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
