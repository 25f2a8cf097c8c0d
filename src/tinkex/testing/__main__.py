"""Serve in the foreground: `python -m tinkex.testing`; the first line of output is the URL."""

from __future__ import annotations

import argparse
import signal
import sys

from tinkex.engine.fake.engine import DEFAULT_MODELS
from tinkex.testing.dialects import DIALECTS
from tinkex.testing.server import StubServer

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM, then stop cleanly."""
    options = _parser().parse_args(arguments)
    # Blocked before the server's threads exist, so that only this thread receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with StubServer(
        port=options.port,
        record=options.record,
        dialect=options.dialect,
        api_keys=options.api_key,
        work_seconds=options.work_seconds,
        long_poll_seconds=options.long_poll_seconds,
        models=options.model or DEFAULT_MODELS,
    ) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        signal.sigwait(_SIGNALS)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinkex.testing",
        description="A Tinker server with a tiny real model, for tests.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=0, help="port to serve on; 0 takes a free one")
    parser.add_argument(
        "--no-record", dest="record", action="store_false", help="do not keep the calls"
    )
    parser.add_argument("--dialect", choices=DIALECTS, default="current", help="kind of server")
    parser.add_argument(
        "--api-key", action="append", help="a key that opens the server; may be repeated"
    )
    parser.add_argument(
        "--model", action="append", help="a base model of the fake engine; may be repeated"
    )
    parser.add_argument(
        "--work-seconds", type=float, default=0.0, help="how long each operation takes"
    )
    parser.add_argument(
        "--long-poll-seconds", type=float, default=30.0, help="how long a poll waits for a result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
