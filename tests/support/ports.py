"""Ports for processes that bind them later."""

from __future__ import annotations

import os
import random
import socket

#: Below the ports that systems give to outgoing connections and to servers that ask for any port:
#: between the choice and the bind, no connection of another test can take one of these.
LOWEST, HIGHEST = 15_000, 30_000


def free_port() -> int:
    """A port of 127.0.0.1 that is free now and that only a server which names it can take."""
    rng = random.Random(os.urandom(8))
    for _ in range(100):
        port = rng.randint(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {LOWEST} to {HIGHEST} is free")
