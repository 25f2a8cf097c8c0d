"""What hostile clients cost the others: how long `healthz` takes, and how much memory is held.

Each attack runs in a process of its own, against one server with the fake engine and one API
process; meanwhile this process asks for `healthz` on fresh connections. Attacks come from another
loopback address. Ours is the 95th percentile during the attack, other is the same on the quiet
server; likewise the memory of the API process. One row uses a kept connection from the attacker's
own address during the pipelined flood.
`python -m benchmarks hostile --quick` attacks for a second each.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import Row, at_most
from benchmarks.bench_server import Server, serve

SECONDS, QUICK_SECONDS = 6.0, 1.0
#: Between two probes; a monitor asks far less often.
PAUSE_SECONDS = 0.01
TIMEOUT_SECONDS = 120.0
#: Until the server has closed what is left of an attack.
SETTLE_SECONDS = 3.0
MEBI = 1024 * 1024
#: What is left of the memory of an attack must not grow from one to the next.
MAX_GROWTH = 4.0
JSON = "application/json"
#: Attacks come from another address than the probes, as those of another machine do.
ATTACKER_HOST = "127.0.0.2"


class Attacker:
    """Somebody with a key who sends what nobody should."""

    def __init__(self, port: int, key: str, ends_at: float, host: str = ATTACKER_HOST) -> None:
        self._port = port
        self._host = host
        self._key = key
        self._ends_at = ends_at

    @property
    def is_on(self) -> bool:
        """Whether the attack goes on."""
        return time.monotonic() < self._ends_at

    def connect(self) -> socket.socket:
        """A new connection."""
        address = ("127.0.0.1", self._port)
        return socket.create_connection(address, timeout=5.0, source_address=(self._host, 0))

    def head(self, path: str, length: int | None, **headers: str) -> bytes:
        """The head of a POST; without a length its body is chunked."""
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = [f"POST /api/v1/{path} HTTP/1.1", "Host: x", f"X-API-Key: {self._key}", size]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def post(self, path: str, body: bytes, **headers: str) -> None:
        """One request, of which the first bytes of the answer are read."""
        with contextlib.suppress(OSError), self.connect() as line:
            line.sendall(self.head(path, len(body), Content_Type=JSON, **headers) + body)
            line.recv(4096)

    def wait(self) -> None:
        """Hold what is open until the attack ends."""
        while self.is_on:
            time.sleep(0.05)


def _packed(body: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(body)


def metadata_bomb(attacker: Attacker) -> None:
    """Less than a kilobyte that unpacks to 8 MiB of empty objects in user_metadata."""
    packed = _packed(b'{"user_metadata":[' + b"{}," * (8 * MEBI // 3) + b"{}]}")
    while attacker.is_on:
        attacker.post("create_session", packed, Content_Encoding="zstd")


def object_bomb(attacker: Attacker) -> None:
    """The same of 60 MiB, where tensors are expected."""
    packed = _packed(b'{"forward_input":[' + b"{}," * (20 * MEBI) + b"{}]}")
    while attacker.is_on:
        attacker.post("forward", packed, Content_Encoding="zstd")


def number_bomb(attacker: Attacker) -> None:
    """Four million numbers, which is as many as are taken."""
    packed = _packed(b'{"prompt":{"chunks":[[' + b"1," * 3_900_000 + b"1]]}}")
    while attacker.is_on:
        attacker.post("asample", packed, Content_Encoding="zstd")


def deep_nesting(attacker: Attacker) -> None:
    """Lists in lists, half a million deep."""
    packed = _packed(b'{"prompt":' + b"[" * 500_000)
    while attacker.is_on:
        attacker.post("asample", packed, Content_Encoding="zstd")


def half_sent(attacker: Attacker) -> None:
    """1,300 requests of which the head never ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(1300):
            with contextlib.suppress(OSError):
                line = stack.enter_context(attacker.connect())
                line.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: ")
        attacker.wait()


def stopped_uploads(attacker: Attacker) -> None:
    """20 uploads of 60 MiB that stop one byte early."""
    body = bytes(60 * MEBI)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            with contextlib.suppress(OSError):
                line = stack.enter_context(attacker.connect())
                line.sendall(attacker.head("asample", len(body) + 1, Content_Type=JSON) + body)
        attacker.wait()


def header_bomb(attacker: Attacker) -> None:
    """One header without end."""
    while attacker.is_on:
        with contextlib.suppress(OSError), attacker.connect() as line:
            line.sendall(b"GET / HTTP/1.1\r\nx: ")
            for _ in range(256):
                line.sendall(b"y" * 65536)


def pipelined(attacker: Attacker) -> None:
    """Thousands of requests at once on a connection, none of whose answers is read."""
    requests = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 5000
    while attacker.is_on:
        with contextlib.suppress(OSError), attacker.connect() as line:
            line.sendall(requests)


def tiny_chunks(attacker: Attacker) -> None:
    """A chunked body of one byte per chunk, without end."""
    while attacker.is_on:
        with contextlib.suppress(OSError), attacker.connect() as line:
            line.sendall(attacker.head("asample", None, Content_Type=JSON))
            for _ in range(1000):
                line.sendall(b"1\r\n[\r\n" * 10_000)


def endless_body(attacker: Attacker) -> None:
    """A chunked body without end, where there is no key."""
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    while attacker.is_on:
        with contextlib.suppress(OSError), attacker.connect() as line:
            line.sendall(attacker.head("asample", None, X_API_Key="tml-nobody"))
            while attacker.is_on:
                line.sendall(chunk)


def long_query(attacker: Attacker) -> None:
    """A query of 60 KiB on every request."""
    query = "&".join(f"limit={number}" for number in range(5000))
    request = f"GET /api/v1/sessions?{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    while attacker.is_on:
        with contextlib.suppress(OSError), attacker.connect() as line:
            line.sendall(request)
            line.recv(4096)


ATTACKS: tuple[Callable[[Attacker], None], ...] = (
    metadata_bomb,
    object_bomb,
    number_bomb,
    deep_nesting,
    half_sent,
    stopped_uploads,
    header_bomb,
    pipelined,
    tiny_chunks,
    endless_body,
    long_query,
)


def _attack(number: int, port: int, key: str, seconds: float) -> None:
    """Runs in a process of its own."""
    ATTACKS[number](Attacker(port, key, time.monotonic() + seconds))


@contextlib.contextmanager
def attacking(number: int, server: Server, seconds: float) -> Iterator[Any]:
    """An attack under way."""
    context = multiprocessing.get_context("spawn")
    arguments = (number, server.port, server.key, seconds + 1.0)
    process = context.Process(target=_attack, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def probe(server: Server, seconds: float) -> list[float]:
    """How long healthz took, in milliseconds, each time on a new connection."""
    url = f"http://127.0.0.1:{server.port}/api/v1/healthz"
    taken: list[float] = []
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        started = time.perf_counter()
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer,
        ):
            answer.read()
        taken.append(1000.0 * (time.perf_counter() - started))
        time.sleep(PAUSE_SECONDS)
    return taken


class KeepAliveConnection:
    """One connection from the address of the attacker that is kept open."""

    def __init__(self, server: Server) -> None:
        self._line = http.client.HTTPConnection(
            "127.0.0.1", server.port, timeout=TIMEOUT_SECONDS, source_address=(ATTACKER_HOST, 0)
        )
        self.ask()

    def ask(self) -> float:
        """How long healthz took, in milliseconds."""
        started = time.perf_counter()
        self._line.request("GET", "/api/v1/healthz")
        self._line.getresponse().read()
        return 1000.0 * (time.perf_counter() - started)

    def probe(self, seconds: float) -> float:
        """The 95th percentile of that."""
        taken: list[float] = []
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            taken.append(self.ask())
            time.sleep(PAUSE_SECONDS)
        return percentile(taken)


def keep_alive_row(server: Server, seconds: float) -> Row:
    """A small request on a kept connection while its own address pipelines."""
    time.sleep(SETTLE_SECONDS)
    kept = KeepAliveConnection(server)
    quiet = kept.probe(seconds)
    with attacking(ATTACKS.index(pipelined), server, seconds):
        time.sleep(0.5)
        taken = kept.probe(seconds)
    return at_most("hostile: healthz on a kept connection during pipelined", taken, quiet, "ms")


def percentile(values: Sequence[float], share: float = 0.95) -> float:
    """The value below which this share lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def api_pid(server: Server) -> int:
    """The process that answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        found = re.search(r'tinkex_api_process{pid="(\d+)"}', answer.read().decode())
    assert found is not None
    return int(found[1])


def rss_mebibytes(pid: int) -> float:
    """The most memory that a process has held since it was last asked."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(found[1]) / 1024


def main(options: Sequence[str] = ()) -> list[Row]:
    """The rows of every attack."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks hostile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="attack for a second each")
    parser.add_argument("--only", help="the attacks whose name contains this")
    parser.add_argument("--workers", default="1", help="workers of the server")
    chosen = parser.parse_args(options)
    seconds = QUICK_SECONDS if chosen.quick else SECONDS
    rows: list[Row] = []
    with serve(TINKEX_WORKERS=chosen.workers) as server:
        pid = api_pid(server)
        quiet = percentile(probe(server, seconds))
        memory = rss_mebibytes(pid)
        for number, attack in enumerate(ATTACKS):
            name = attack.__name__.replace("_", " ")
            if chosen.only and chosen.only not in name:
                continue
            with attacking(number, server, seconds):
                time.sleep(0.5)
                taken = percentile(probe(server, seconds))
            rows.append(at_most(f"hostile: healthz during {name}", taken, quiet, "ms"))
            held = rss_mebibytes(pid)
            title = f"hostile: memory during {name}"
            rows.append(at_most(title, held, memory, "MiB"))
            if attack is pipelined:
                rows.append(keep_alive_row(server, seconds))
        if api_pid(server) != pid:
            raise RuntimeError("an attack ended the API process")
    return rows


if __name__ == "__main__":
    print(json.dumps({"rows": main()}))
