"""The application on a real socket, for what only shows there: cut lines, closed connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from tests.support.server_harness import ServerHarness
from tinkex.server.app import create_app

#: Nothing here takes this long; it only says that nothing hangs.
TIMEOUT_SECONDS = 60.0


@contextlib.contextmanager
def serve_on_socket(harness: ServerHarness) -> Iterator[str]:
    """Serve a house's things at the URL that this yields."""
    # The house itself has opened what the application's lifespan would open.
    config = uvicorn.Config(create_app(harness.services), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    # Named as TCP, the loop sends small answers at once.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()
