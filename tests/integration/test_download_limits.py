"""Limits for downloads and responses of a faulty server: endless, oversized, compressed."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tinkex.checkpoint import manifest as manifest_module
from tinkex.client import http as http_module
from tinkex.client.config import Config
from tinkex.client.download import directory as download_module
from tinkex.client.download.directory import download_directory, download_file
from tinkex.client.http import HttpClient, HttpStream
from tinkex.errors import APIResponseValidationError, DownloadError

MB = 2**20
#: Maximum size of an endless body, so that a client without limits still ends.
ENDLESS_BYTES = 64 * MB


@dataclass
class Reply:
    """One response; an endless body is sent in chunks."""

    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    is_endless: bool = False


@dataclass
class Server:
    """The server's responses by path, and the bytes sent of endless bodies."""

    replies: dict[str, Reply] = field(default_factory=dict)
    url: str = ""
    num_sent: int = 0
    requests: list[str] = field(default_factory=list)

    def urls(self) -> dict[str, str]:
        return {name: f"{self.url}/{name}" for name in self.replies}


class Handler(BaseHTTPRequestHandler):
    """Sends the configured responses."""

    protocol_version = "HTTP/1.1"
    server_state: Server

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server_state.requests.append(name)
        reply = self.server_state.replies[name]
        self.send_response(reply.status)
        is_sized = not reply.is_endless and "Content-Length" not in reply.headers
        sized = {"Content-Length": str(len(reply.body))} if is_sized else {}
        chunked = {"Transfer-Encoding": "chunked"} if reply.is_endless else {}
        for key, value in (sized | chunked | reply.headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True
        try:
            self.send_body(reply)
        except ConnectionError:  # the client closed the connection, as expected
            return

    def send_body(self, reply: Reply) -> None:
        self.wfile.write(reply.body if not reply.is_endless else b"")
        block = b"x" * MB
        while reply.is_endless and self.server_state.num_sent < ENDLESS_BYTES:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
            self.server_state.num_sent += len(block)
        if reply.is_endless:
            self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    handler = type("BoundHandler", (Handler,), {"server_state": state})
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
    yield state
    http_server.shutdown()
    thread.join()
    http_server.server_close()


Fetch = Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[HttpStream]]


def fetcher(server: Server) -> Fetch:
    """The client's HTTP stack, which also decompresses unrequested compression."""
    client = HttpClient(Config(base_url=server.url))

    @asynccontextmanager
    async def fetch(url: str, headers: Mapping[str, str]) -> AsyncIterator[HttpStream]:
        async with client.stream(url, headers, 20.0) as stream:
            yield stream

    return fetch


async def no_sleep(_seconds: float) -> None:
    """Retry immediately."""


def left_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def get(server: Server, folder: Path, **options: Any) -> Path:
    url = f"{server.url}/model.bin"
    return await download_file(
        fetcher(server), url, folder / "model.bin", sleep=no_sleep, **options
    )


async def get_tree(server: Server, folder: Path, **options: Any) -> Path:
    return await download_directory(
        fetcher(server), server.urls(), folder / "out", sleep=no_sleep, **options
    )


# --- files of undeclared size -----------------------------------------------------------------


@pytest.mark.asyncio
async def test_endless_file_is_stopped_and_deleted(server: Server, tmp_path: Path) -> None:
    server.replies["model.bin"] = Reply(is_endless=True)
    with pytest.raises(DownloadError, match=r"at most 3,000,000 are accepted") as caught:
        await get(server, tmp_path, max_unsized_bytes=3_000_000)
    assert "bytes arrived without a declared size" in caught.value.message
    assert "TINKEX_MAX_UNSIZED_DOWNLOAD_BYTES" in (caught.value.hint or "")
    assert left_on_disk(tmp_path) == 0
    assert server.requests == ["model.bin"], "a refused download is not retried"


@pytest.mark.asyncio
async def test_unsized_file_below_limit_is_downloaded(server: Server, tmp_path: Path) -> None:
    server.replies["model.bin"] = Reply(is_endless=True)
    path = await get(server, tmp_path, max_unsized_bytes=ENDLESS_BYTES)
    assert path.stat().st_size == ENDLESS_BYTES


@pytest.mark.asyncio
async def test_unsized_limit_covers_all_files_of_a_directory(
    server: Server, tmp_path: Path
) -> None:
    zeros = gzip.compress(bytes(2 * MB))
    packed = Reply(zeros, {"Content-Encoding": "gzip"})
    server.replies = {f"file{index}": packed for index in range(5)}
    with pytest.raises(DownloadError, match=f"at most {7 * MB:,} are accepted"):
        await get_tree(server, tmp_path, max_unsized_bytes=7 * MB, concurrency=1)
    assert not (tmp_path / "out").exists()
    assert (await get_tree(server, tmp_path, max_unsized_bytes=10 * MB)).is_dir()


@pytest.mark.asyncio
@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_decompressed_size_counts_towards_limit(
    server: Server, tmp_path: Path, encoding: str
) -> None:
    pack = gzip.compress if encoding == "gzip" else zstandard.ZstdCompressor().compress
    bomb = pack(bytes(32 * MB))
    assert len(bomb) < MB
    server.replies["model.bin"] = Reply(bomb, {"Content-Encoding": encoding})
    with pytest.raises(DownloadError, match=r"at most 3,000,000 are accepted"):
        await get(server, tmp_path, max_unsized_bytes=3_000_000)
    assert left_on_disk(tmp_path) == 0


@pytest.mark.asyncio
async def test_unsized_file_leaves_disk_reserve(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies["model.bin"] = Reply(is_endless=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Disk(total=900 * MB, free=3 * MB))
    with pytest.raises(DownloadError, match=r"only 3\.1 MB are free"):
        await get(server, tmp_path)
    assert left_on_disk(tmp_path) == 0


@dataclass
class _Disk:
    total: int
    free: int


# --- declared sizes ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_declared_size_beyond_free_space_is_rejected_up_front(
    server: Server, tmp_path: Path
) -> None:
    server.replies["model.bin"] = Reply(b"x", {"Content-Length": str(10**17)})
    with pytest.raises(DownloadError, match=r"model\.bin needs 100 PB of disk space, but .* free"):
        await get(server, tmp_path)
    assert left_on_disk(tmp_path) == 0
    assert server.requests == ["model.bin"]


@pytest.mark.asyncio
async def test_declared_sizes_are_summed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = {f"file{index}": Reply(bytes(1000)) for index in range(4)}
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Disk(total=200 * MB, free=3500))
    sizes = dict.fromkeys(server.replies, 1000)
    with pytest.raises(DownloadError, match=r"The download needs 4\.0 kB of disk space"):
        await get_tree(server, tmp_path, sizes=sizes)
    assert server.requests == []


def manifest_of(size: int) -> bytes:
    digest = hashlib.sha256(b"x").hexdigest()
    return json.dumps({"files": {"model.bin": {"size": size, "sha256": digest}}}).encode()


@pytest.mark.asyncio
async def test_excessive_manifest_size_is_rejected_before_download(
    server: Server, tmp_path: Path
) -> None:
    server.replies = {
        "manifest.json": Reply(manifest_of(10**17)),
        "model.bin": Reply(is_endless=True),
    }
    with pytest.raises(DownloadError, match="The download needs 100 PB of disk space"):
        await get_tree(server, tmp_path, max_unsized_bytes=3_000_000)
    assert server.requests == ["manifest.json"]


@pytest.mark.asyncio
async def test_invalid_manifest_size_does_not_lift_limit(server: Server, tmp_path: Path) -> None:
    server.replies = {
        "manifest.json": Reply(manifest_of(10**400)),
        "model.bin": Reply(is_endless=True),
    }
    with pytest.raises(DownloadError, match=r"at most 3,000,000 are accepted"):
        await get_tree(server, tmp_path, max_unsized_bytes=3_000_000)


@pytest.mark.asyncio
async def test_more_bytes_than_in_manifest_are_rejected(server: Server, tmp_path: Path) -> None:
    server.replies = {
        "manifest.json": Reply(manifest_of(1)),
        "model.bin": Reply(is_endless=True),
    }
    with pytest.raises(DownloadError, match="more than the declared 1 bytes"):
        await get_tree(server, tmp_path, retries=0)
    assert server.num_sent < ENDLESS_BYTES


@pytest.mark.asyncio
@pytest.mark.parametrize("is_endless", [True, False])
async def test_manifest_size_is_limited(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_endless: bool
) -> None:
    monkeypatch.setattr(download_module, "MAX_MANIFEST_BYTES", MB)
    body = Reply(is_endless=True) if is_endless else Reply(b" " * (MB + 1))
    server.replies = {"manifest.json": body, "model.bin": Reply(b"x")}
    with pytest.raises(DownloadError, match=r"manifest\.json has at least .* at most 1,048,576"):
        await get_tree(server, tmp_path)
    assert server.requests == ["manifest.json"]
    assert server.num_sent < ENDLESS_BYTES
    assert manifest_module.MAX_MANIFEST_BYTES > 10 * MB


@pytest.mark.asyncio
async def test_too_many_files_are_rejected(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "MAX_MEMBERS", 3)
    server.replies = {f"file{index}": Reply() for index in range(4)}
    with pytest.raises(DownloadError, match="The server lists 4 files; at most 3"):
        await get_tree(server, tmp_path)


# --- responses that are read into memory --------------------------------------------------------


async def send_get(server: Server, max_response_bytes: int = 2 * MB) -> Any:
    config = Config(base_url=server.url, max_response_bytes=max_response_bytes)
    return await HttpClient(config).send("GET", f"{server.url}/answer", {}, None, 20.0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "reply",
    [
        Reply(is_endless=True),
        Reply(b"x", {"Content-Length": str(10**17)}),
        Reply(gzip.compress(bytes(32 * MB)), {"Content-Encoding": "gzip"}),
    ],
    ids=["endless", "declared", "bomb"],
)
async def test_oversized_response_is_rejected(server: Server, reply: Reply) -> None:
    server.replies["answer"] = reply
    with pytest.raises(
        APIResponseValidationError, match="at most 2,097,152 are accepted"
    ) as caught:
        await send_get(server)
    assert "max_response_bytes" in (caught.value.hint or "")
    assert not caught.value.retryable
    assert server.num_sent < ENDLESS_BYTES


@pytest.mark.asyncio
async def test_response_up_to_limit_is_accepted(server: Server) -> None:
    server.replies["answer"] = Reply(bytes(2 * MB))
    assert (await send_get(server)).content == bytes(2 * MB)
    server.replies["answer"] = Reply(gzip.compress(bytes(2 * MB)), {"Content-Encoding": "gzip"})
    assert (await send_get(server)).content == bytes(2 * MB)
    server.replies["answer"] = Reply(status=204)
    assert (await send_get(server)).content == b""


@pytest.mark.asyncio
async def test_endless_error_response_is_truncated(server: Server) -> None:
    server.replies["answer"] = Reply(status=500, is_endless=True)
    response = await send_get(server, max_response_bytes=2**30)
    assert (response.status_code, len(response.content)) == (500, http_module.MAX_ERROR_BYTES)
    assert server.num_sent < ENDLESS_BYTES


@pytest.mark.asyncio
async def test_streamed_response_is_limited(server: Server) -> None:
    server.replies["answer"] = Reply(is_endless=True)
    async with fetcher(server)(f"{server.url}/answer", {}) as stream:
        with pytest.raises(APIResponseValidationError, match="at most 1,000,000 are accepted"):
            await stream.read(1_000_000)
    assert server.num_sent < ENDLESS_BYTES
