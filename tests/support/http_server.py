"""A plain HTTP server in a thread of its own, for tests that need no more than that."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class SmallServer:
    """Answers on this machine until it is closed; its handlers know it as `hub`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        mine = type("Handler", (handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), mine)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
