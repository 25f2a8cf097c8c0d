"""A real S3 server on free loopback ports: SeaweedFS, which verifies credentials."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.ports import free_port

ACCESS_KEY, SECRET_KEY = "tinkex", "secret of the tests"
#: One bucket for all tests, because each reserves volumes of its own.
BUCKET = "tinkex"
_START_SECONDS = 60.0
_ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]
_PORTS = ("master", "volume", "filer", "s3")


class S3Server:
    """A server that can be stopped and started again with the same objects."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tinkex-s3-"))
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": _ACTIONS,
        }
        (self._directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._ports = {
            f"{name}.port{kind}": free_port() for name in _PORTS for kind in ("", ".grpc")
        }
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """The port of the S3 API."""
        return self._ports["s3.port"]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a client."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server and wait until it stores objects."""
        options = {
            "dir": str(self._directory),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": str(self._directory / "s3.json"),
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.iam": "false",
            "s3.autoCreateBucket": "false",
            "master.volumeSizeLimitMB": "64",
            "volume.max": "40",
            "volume.preStopSeconds": "0",
            **{name: str(port) for name, port in self._ports.items()},
        }
        command = [
            str(Path(sys.executable).with_name("weed")),
            "server",
            "-filer",
            "-s3",
            *(f"-{name}={value}" for name, value in options.items()),
        ]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        port = self._ports["filer.port"]
        self._wait_for_answer(f"http://127.0.0.1:{port}/buckets/{BUCKET}/", "POST")
        self._wait_for_answer(f"http://127.0.0.1:{self.port}/{BUCKET}", "GET")

    def _wait_for_answer(self, url: str, method: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                request = urllib.request.Request(url, method=method)
                urllib.request.urlopen(request, timeout=5).close()
                return
            except urllib.error.HTTPError as error:
                # The bucket exists, or a credential is missing.
                assert error.code in {403, 409}, error
                return
            except OSError as error:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self._directory / "log").read_text(errors="replace")
                    raise AssertionError(f"the S3 server did not start: {log[-2000:]}") from error
                time.sleep(0.02)

    def stop(self) -> None:
        """Kill the server; its objects stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        """Stop the server and remove its objects."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


class Door:
    """A TCP proxy in front of a server, which refuses connections while it is closed."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.num_received = 0
        """Bytes that clients have received."""
        self.num_sent = 0
        """Bytes that clients have sent."""
        self.may_send = threading.Event()
        """While it is not set, nothing that clients send arrives."""
        self.may_send.set()
        self.stop_after: int | None = None
        """Nothing more arrives after clients have sent this many bytes."""
        self.port = free_port()
        self.open()

    def open(self) -> None:
        """Accept connections."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections and cut the existing ones."""
        if self._listener is not None:
            # A blocked accept() keeps the port; shutdown() ends it.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            existing, self._sockets = self._sockets, set()
        for one in existing:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, suppress(ConnectionRefusedError), self._connect() as server:
            with self._lock:
                self._sockets |= {client, server}
            back = threading.Thread(target=_copy, args=(server, client, self._count), daemon=True)
            back.start()
            _copy(client, server, self._count_sent)
            back.join()
            with self._lock:
                self._sockets -= {client, server}

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._target_port))

    def _count_sent(self, num_bytes: int) -> None:
        with self._lock:
            self.num_sent += num_bytes
            if self.stop_after is not None and self.num_sent > self.stop_after:
                self.may_send.clear()
        self.may_send.wait(60)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_received += num_bytes


def _copy(
    source: socket.socket, target: socket.socket, count: Callable[[int], None] = lambda _: None
) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            count(len(data))
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class S3Bucket:
    """A prefix of its own on a shared server, behind a door of its own."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
        self.door = Door(server.port)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a client that goes through the door."""
        return self._server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.door.port}"}

    def restart_server(self) -> None:
        """Kill the server and start it again, which takes long."""
        self._server.stop()
        self._server.start()

    def __enter__(self) -> S3Bucket:
        return self

    def __exit__(self, *error: object) -> None:
        self.door.close()
