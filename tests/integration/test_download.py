"""Downloads over HTTP: lost connections, changed files, wrong sizes, directories."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyqwest
import pytest

from tinkex.client.download.directory import download_directory, download_file
from tinkex.client.download.partial_file import PartialFile
from tinkex.client.download.transfer import ResponseStream
from tinkex.errors import APIConnectionError, DownloadError, InvalidInput

DATA = bytes(range(251)) * 20_000  # 5 MB: several blocks
DIGEST = hashlib.sha256(DATA).hexdigest()
NOTES = json.dumps({"etag": '"v1"', "num_bytes": len(DATA)})


@dataclass
class ResponseFault:
    """How the server handles one request."""

    status: int | None = None
    cut: int | None = None
    ignores_range: bool = False
    is_chunked: bool = False
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class FileServer:
    """The server's files, its next responses, and the recorded requests."""

    files: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = '"v1"'
    last_modified: str | None = None
    faults: list[ResponseFault] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""
    num_open: int = 0
    max_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def urls(self) -> dict[str, str]:
        return {name: f"{self.url}/{name}" for name in self.files}


class Handler(BaseHTTPRequestHandler):
    """Serves GET with ranges, and faults on demand."""

    protocol_version = "HTTP/1.1"
    file_server: FileServer

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

    def do_GET(self) -> None:
        file_server, name = self.file_server, self.path.lstrip("/").partition("?")[0]
        with file_server.lock:
            file_server.requests.append((name, self.headers["Range"]))
            act = file_server.faults.pop(0) if file_server.faults else ResponseFault()
            file_server.num_open += 1
            file_server.max_open = max(file_server.max_open, file_server.num_open)
        try:
            self.answer(act, file_server.files.get(name))
        finally:
            with file_server.lock:
                file_server.num_open -= 1

    def answer(self, act: ResponseFault, data: bytes | None) -> None:
        if act.status or data is None:
            self.reply(act.status or 404, {"Content-Length": "0"} | act.headers)
            return
        size, start = len(data), self.start(act)
        if start is not None and start >= size:
            self.reply(416, {"Content-Length": "0", "Content-Range": f"bytes */{size}"})
            return
        headers = {"Content-Length": str(size - (start or 0))}
        if start is not None:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if act.is_chunked:
            headers = {"Transfer-Encoding": "chunked"}
        self.reply(200 if start is None else 206, headers | act.headers)
        self.send_body(act, data[start or 0 :])

    def start(self, act: ResponseFault) -> int | None:
        wanted, condition = self.headers["Range"], self.headers["If-Range"]
        is_stale = condition not in {None, self.file_server.etag, self.file_server.last_modified}
        if wanted is None or is_stale or act.ignores_range:
            return None
        match = re.fullmatch(r"bytes=(\d+)-", wanted)
        assert match is not None
        return int(match[1])

    def reply(self, status: int, headers: dict[str, str]) -> None:
        known = {"ETag": self.file_server.etag, "Last-Modified": self.file_server.last_modified}
        self.send_response(status)
        for name, value in (known | headers).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def send_body(self, act: ResponseFault, body: bytes) -> None:
        if act.is_chunked:
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        self.close_connection = act.cut is not None
        try:
            self.wfile.write(body[: act.cut])
        except ConnectionError:  # the client closed the connection
            self.close_connection = True


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """A loopback server for one test."""
    file_server = FileServer(files={"model.bin": DATA})
    handler = type("BoundHandler", (Handler,), {"file_server": file_server})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    file_server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield file_server
    server.shutdown()
    thread.join()
    server.server_close()


class HttpStream:
    """Adapts a pyqwest response to the ResponseStream protocol."""

    def __init__(self, reply: pyqwest.Response) -> None:
        self.status = reply.status
        self.headers = {name.lower(): value for name, value in reply.headers.items()}
        self._reply = reply

    async def chunks(self) -> AsyncIterator[bytes | bytearray | memoryview]:
        try:
            async for piece in self._reply.content:
                yield piece
        except (pyqwest.ReadError, pyqwest.RemoteProtocolError) as error:
            raise APIConnectionError(None, "The download was interrupted") from error


@asynccontextmanager
async def fetch(url: str, headers: Mapping[str, str]) -> AsyncIterator[ResponseStream]:
    assert headers["accept-encoding"] == "identity"
    async with pyqwest.Client().stream("GET", url, headers=headers) as reply:
        yield HttpStream(reply)


class Waits:
    """A sleep that only records its durations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def ranges(file_server: FileServer) -> list[str | None]:
    return [wanted for _, wanted in file_server.requests]


async def get(file_server: FileServer, folder: Path, **options: Any) -> Path:
    options.setdefault("sleep", Waits())
    return await download_file(
        fetch, f"{file_server.url}/model.bin", folder / "model.bin", **options
    )


def assert_only(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


# --- one file -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_downloaded_file_is_verified_with_progress(
    file_server: FileServer, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    path = await get(
        file_server,
        tmp_path,
        expected_bytes=len(DATA),
        expected_sha256=DIGEST.upper(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert path.read_bytes() == DATA
    assert_only(tmp_path, "model.bin")
    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)
    assert len(seen) <= 7, "bytes are written in big blocks"
    assert ranges(file_server) == [None]


@pytest.mark.asyncio
async def test_existing_file_is_replaced_and_directories_are_created(
    file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_text("old")
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == DATA
    await get(file_server, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_empty_file_and_unknown_size(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["model.bin"] = b""
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == b""
    file_server.files["model.bin"] = DATA
    file_server.faults = [ResponseFault(is_chunked=True)]
    seen: list[int | None] = []
    await get(file_server, tmp_path, progress=lambda _, total: seen.append(total))
    assert (tmp_path / "model.bin").read_bytes() == DATA
    assert set(seen) == {None}


@pytest.mark.asyncio
@pytest.mark.parametrize("validator", ["etag", "last_modified"])
async def test_lost_connection_is_resumed(
    file_server: FileServer, tmp_path: Path, validator: str
) -> None:
    file_server.etag = None
    setattr(
        file_server, validator, '"v1"' if validator == "etag" else "Mon, 01 Jan 2024 00:00:00 GMT"
    )
    file_server.faults = [ResponseFault(cut=2_000_000), ResponseFault(cut=1_500_000)]
    await get(file_server, tmp_path, expected_sha256=DIGEST)
    assert (tmp_path / "model.bin").read_bytes() == DATA
    assert ranges(file_server) == [None, "bytes=2000000-", "bytes=3500000-"]


@pytest.mark.asyncio
async def test_download_without_validator_restarts(file_server: FileServer, tmp_path: Path) -> None:
    file_server.etag = 'W/"weak"'
    file_server.faults = [ResponseFault(cut=2_000_000)]
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == DATA
    assert ranges(file_server) == [None, None]


@pytest.mark.asyncio
async def test_expected_digest_allows_resume_without_validator(
    file_server: FileServer, tmp_path: Path
) -> None:
    file_server.etag = None
    file_server.faults = [ResponseFault(cut=2_000_000)]
    await get(file_server, tmp_path, expected_sha256=DIGEST)
    assert ranges(file_server) == [None, "bytes=2000000-"]
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_download_restarts_if_the_server_ignores_ranges(
    file_server: FileServer, tmp_path: Path
) -> None:
    file_server.faults = [ResponseFault(cut=2_000_000), ResponseFault(ignores_range=True)]
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == DATA
    assert ranges(file_server) == [None, "bytes=2000000-"]


@pytest.mark.asyncio
async def test_changed_file_is_not_resumed(file_server: FileServer, tmp_path: Path) -> None:
    file_server.faults = [ResponseFault(cut=2_000_000), ResponseFault(status=404)]
    with pytest.raises(DownloadError, match="answered 404"):
        await get(file_server, tmp_path)
    assert_only(tmp_path, "model.bin.part", "model.bin.part.json")
    file_server.etag, file_server.files["model.bin"] = '"v2"', DATA[::-1]
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == DATA[::-1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"other"'},
        {"Content-Range": f"bytes 1000000-{len(DATA) - 1}/{len(DATA)}"},
        {"Content-Range": f"bytes 2000000-{len(DATA)}/{len(DATA) + 1}"},
        {"Content-Range": "bytes nonsense"},
    ],
)
async def test_mismatched_range_restarts(
    file_server: FileServer, tmp_path: Path, headers: dict[str, str]
) -> None:
    file_server.faults = [ResponseFault(cut=2_000_000), ResponseFault(headers=headers)]
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == DATA
    assert ranges(file_server) == [None, "bytes=2000000-", None]


@pytest.mark.asyncio
async def test_complete_partial_file_is_not_downloaded_again(
    file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "model.bin.part").write_bytes(DATA)
    (tmp_path / "model.bin.part.json").write_text(NOTES)
    await get(file_server, tmp_path)
    assert ranges(file_server) == ["bytes=5020000-"]
    assert_only(tmp_path, "model.bin")


@pytest.mark.asyncio
async def test_partial_file_that_is_too_long_restarts(
    file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "model.bin.part").write_bytes(DATA + b"more")
    (tmp_path / "model.bin.part.json").write_text(NOTES)
    await get(file_server, tmp_path)
    assert ranges(file_server) == ["bytes=5020004-", None]
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_complete_file_with_known_digest_needs_no_request(
    file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "model.bin.part").write_bytes(DATA)
    await get(file_server, tmp_path, expected_bytes=len(DATA), expected_sha256=DIGEST)
    assert file_server.requests == []
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_corrupt_partial_file_is_downloaded_again(
    file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "model.bin.part").write_bytes(b"rotten" * 100)
    (tmp_path / "model.bin.part.json").write_text(NOTES)
    await get(file_server, tmp_path, expected_sha256=DIGEST)
    assert ranges(file_server) == ["bytes=600-", None]
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_busy_server_is_retried(file_server: FileServer, tmp_path: Path) -> None:
    waits = Waits()
    file_server.faults = [
        ResponseFault(status=503, headers={"Retry-After": "30"}),
        ResponseFault(status=429),
        ResponseFault(status=408),
    ]
    await get(file_server, tmp_path, sleep=waits)
    assert (tmp_path / "model.bin").read_bytes() == DATA
    assert waits.seconds[0] == 30.0
    assert 0.7 < waits.seconds[1] < waits.seconds[2] <= 2.0


@pytest.mark.asyncio
async def test_busy_server_exhausts_retries(file_server: FileServer, tmp_path: Path) -> None:
    waits = Waits()
    file_server.faults = [ResponseFault(status=503)] * 10
    with pytest.raises(DownloadError, match=r"model\.bin stopped at 0 of \? bytes: .*answered 503"):
        await get(file_server, tmp_path, retries=3, sleep=waits)
    assert len(file_server.requests) == 4
    assert len(waits.seconds) == 3
    assert_only(tmp_path)


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [401, 403, 404, 400])
async def test_client_error_is_final(file_server: FileServer, tmp_path: Path, status: int) -> None:
    file_server.faults = [ResponseFault(status=status)]
    with pytest.raises(DownloadError, match=f"Cannot download model.bin: .*{status}") as caught:
        await get(file_server, tmp_path)
    assert caught.value.status == status
    assert caught.value.is_user_error
    assert file_server.url not in str(caught.value), "a signed URL is a secret"
    assert len(file_server.requests) == 1
    assert_only(tmp_path)


@pytest.mark.asyncio
async def test_should_retry_false_is_final(file_server: FileServer, tmp_path: Path) -> None:
    file_server.faults = [ResponseFault(status=503, headers={"x-should-retry": "false"})]
    with pytest.raises(DownloadError, match="503"):
        await get(file_server, tmp_path)
    assert len(file_server.requests) == 1


@pytest.mark.asyncio
async def test_short_file_error_shows_both_sizes(file_server: FileServer, tmp_path: Path) -> None:
    file_server.faults = [ResponseFault(cut=500, ignores_range=True)] * 20
    with pytest.raises(DownloadError, match="stopped at 500 of 5020000 bytes: The download was"):
        await get(file_server, tmp_path)
    assert len(file_server.requests) == 6, "the first try and five more"
    assert_only(tmp_path, "model.bin.part", "model.bin.part.json")
    await get(file_server, tmp_path, retries=20)
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_progress_resets_retries(file_server: FileServer, tmp_path: Path) -> None:
    file_server.faults = [ResponseFault(cut=300_000)] * 16
    await get(file_server, tmp_path, retries=1, expected_sha256=DIGEST)
    assert len(file_server.requests) == 17


@pytest.mark.asyncio
async def test_wrong_declared_size_is_rejected_before_body(
    file_server: FileServer, tmp_path: Path
) -> None:
    with pytest.raises(DownloadError, match=r"model\.bin has 5020000 bytes on the server.* 77"):
        await get(file_server, tmp_path, expected_bytes=77)
    assert len(file_server.requests) == 1
    assert_only(tmp_path)


@pytest.mark.asyncio
async def test_undeclared_size_is_checked(file_server: FileServer, tmp_path: Path) -> None:
    file_server.faults = [ResponseFault(is_chunked=True)] * 10
    with pytest.raises(DownloadError, match="stopped at 5020000 of 5020001 bytes"):
        await get(file_server, tmp_path, expected_bytes=len(DATA) + 1, retries=0)
    with pytest.raises(DownloadError, match="more than the declared 77 bytes"):
        await get(file_server, tmp_path / "other", expected_bytes=77, retries=0)
    assert_only(tmp_path, "model.bin.part", "model.bin.part.json", "other")
    assert_only(tmp_path / "other")


@pytest.mark.asyncio
async def test_wrong_digest_leaves_no_file(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"model.bin does not have the sha256 {'0' * 64}"):
        await get(file_server, tmp_path, expected_sha256="0" * 64)
    assert len(file_server.requests) == 1
    assert_only(tmp_path)


@pytest.mark.asyncio
async def test_invalid_arguments_are_rejected(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a directory"):
        await download_file(fetch, f"{file_server.url}/model.bin", tmp_path)
    with pytest.raises(InvalidInput, match="64 hexadecimal"):
        await get(file_server, tmp_path, expected_sha256="abc")
    assert file_server.requests == []


class FakeStream:
    """Return a fetch whose bodies end early or with an error."""

    status = 200

    def __init__(self, pieces: list[bytes | BaseException]) -> None:
        self.headers = {"content-length": "30", "etag": '"v1"'}
        self._pieces = pieces

    async def chunks(self) -> AsyncIterator[bytes | bytearray | memoryview]:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield memoryview(piece)


def fake_fetch(*bodies: list[bytes | BaseException]) -> Any:
    left = list(bodies)

    @asynccontextmanager
    async def fetch(_url: str, _headers: Mapping[str, str]) -> AsyncIterator[FakeStream]:
        yield FakeStream(left.pop(0))

    return fetch


@pytest.mark.asyncio
async def test_body_that_ends_early_is_short(tmp_path: Path) -> None:
    quiet = fake_fetch([b"0123456789"], [b"0123"])
    with pytest.raises(DownloadError, match="at 4 of 30 bytes: the connection was closed early"):
        await download_file(quiet, "x", tmp_path / "f", retries=1, sleep=Waits())
    assert not (tmp_path / "f").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError(), EOFError()])
async def test_connection_errors_are_retried(tmp_path: Path, error: Exception) -> None:
    broken = fake_fetch([b"0123456789", error], [b"0123456789" * 3])
    path = await download_file(broken, "x", tmp_path / "f", sleep=Waits())
    assert path.read_bytes() == b"0123456789" * 3


@pytest.mark.asyncio
async def test_more_bytes_than_declared_are_rejected(tmp_path: Path) -> None:
    long = fake_fetch([b"x" * 31], [b"0123456789" * 3])
    path = await download_file(long, "x", tmp_path / "f", sleep=Waits())
    assert path.read_bytes() == b"0123456789" * 3


@pytest.mark.asyncio
async def test_killed_download_is_resumed(file_server: FileServer, tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    def kill(done: int, _total: int | None) -> None:
        if done > 2_000_000:
            raise KilledError

    with pytest.raises(KilledError):
        await get(file_server, tmp_path, progress=kill)
    partial = (tmp_path / "model.bin.part").stat().st_size
    assert 2_000_000 < partial < len(DATA)
    assert not (tmp_path / "model.bin").exists()
    await get(file_server, tmp_path)
    assert ranges(file_server) == [None, f"bytes={partial}-"]
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_cancelled_download_keeps_partial_file(tmp_path: Path) -> None:
    arrived = asyncio.Event()

    @asynccontextmanager
    async def endless(_url: str, _headers: Mapping[str, str]) -> AsyncIterator[Any]:
        class Stream(FakeStream):
            async def chunks(self) -> AsyncIterator[bytes | bytearray | memoryview]:
                yield b"0123456789"
                arrived.set()
                await asyncio.Event().wait()

        yield Stream([])

    task = asyncio.create_task(download_file(endless, "x", tmp_path / "f"))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "f.part").read_bytes() == b"0123456789"
    assert not (tmp_path / "f").exists()


@pytest.mark.asyncio
async def test_two_downloads_cannot_share_a_partial_file(
    file_server: FileServer, tmp_path: Path
) -> None:
    results = await asyncio.gather(
        get(file_server, tmp_path), get(file_server, tmp_path), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, DownloadError)]
    assert len(refused) == 1
    assert "Another download" in str(refused[0])
    assert (tmp_path / "model.bin").read_bytes() == DATA


@pytest.mark.asyncio
async def test_full_disk_keeps_partial_file(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = PartialFile.append

    def fill_up(part: PartialFile, block: bytes | bytearray) -> None:
        if part.num_bytes > 2_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(part, block)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", fill_up)
        with pytest.raises(DownloadError, match="the disk is full"):
            await get(file_server, tmp_path)
    assert (tmp_path / "model.bin.part").stat().st_size > 2_000_000
    await get(file_server, tmp_path)
    assert (tmp_path / "model.bin").read_bytes() == DATA


# --- directories ----------------------------------------------------------------------------

TREE = {
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.bin": DATA,
    "optimizer/state.bin": DATA[:3_000_000],
    "empty": b"",
}


def manifest(files: dict[str, bytes]) -> bytes:
    rows = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    return json.dumps({"version": 1, "files": rows}).encode()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


async def get_tree(file_server: FileServer, folder: Path, **options: Any) -> Path:
    options.setdefault("sleep", Waits())
    return await download_directory(fetch, file_server.urls(), folder / "out", **options)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_manifest", [True, False])
async def test_downloaded_directory_has_all_files(
    file_server: FileServer, tmp_path: Path, has_manifest: bool
) -> None:
    file_server.files = TREE | ({"manifest.json": manifest(TREE)} if has_manifest else {})
    seen: list[tuple[int, int | None]] = []
    out = await get_tree(file_server, tmp_path, progress=lambda *row: seen.append(row))
    assert out == tmp_path / "out"
    assert contents(out) == file_server.files
    assert_only(tmp_path, "out")
    whole = sum(map(len, file_server.files.values()))
    assert seen[-1] == (whole, whole)
    assert file_server.max_open <= 4
    if has_manifest:
        assert file_server.requests[0] == ("manifest.json", None)


@pytest.mark.asyncio
async def test_concurrency_is_limited(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files = {f"f{index}": DATA[:100_000] for index in range(12)}
    await get_tree(file_server, tmp_path, concurrency=2)
    assert file_server.max_open <= 2
    with pytest.raises(InvalidInput, match="concurrency must be at least 1, got 0"):
        await get_tree(file_server, tmp_path / "other", concurrency=0)


@pytest.mark.asyncio
async def test_sizes_and_digests_are_checked(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files = dict(TREE)
    digests = {"adapter_config.json": hashlib.sha256(b"something else").hexdigest()}
    with pytest.raises(DownloadError, match=r"adapter_config\.json does not have the sha256"):
        await get_tree(file_server, tmp_path, digests=digests)
    with pytest.raises(DownloadError, match=r"adapter_config\.json has 8 bytes.*expected 9"):
        await get_tree(file_server, tmp_path, sizes={"adapter_config.json": 9})
    assert not (tmp_path / "out").exists()
    await get_tree(file_server, tmp_path, sizes={name: len(data) for name, data in TREE.items()})
    assert contents(tmp_path / "out") == TREE


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("listed", "offered", "problem"),
    [
        ({"a": b"right"}, {"a": b"wrong"}, "a does not have the sha256"),
        ({"a": b"right"}, {"a": b"too long"}, "a has 8 bytes on the server, expected 5"),
        ({"a": b"x", "b": b"y"}, {"a": b"x"}, "lists 'b', which the server does not offer"),
    ],
)
async def test_manifest_sizes_and_digests_are_enforced(
    file_server: FileServer,
    tmp_path: Path,
    listed: dict[str, bytes],
    offered: dict[str, bytes],
    problem: str,
) -> None:
    file_server.files = offered | {"manifest.json": manifest(listed)}
    with pytest.raises(DownloadError, match=problem):
        await get_tree(file_server, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.asyncio
async def test_manifest_must_agree_with_caller(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files = {"a": b"x", "manifest.json": manifest({"a": b"x"})}
    with pytest.raises(DownloadError, match=r"manifest\.json and the server disagree: 'a'"):
        await get_tree(file_server, tmp_path, sizes={"a": 2})


@pytest.mark.asyncio
@pytest.mark.parametrize("text", [b"{}", b"not json", b'{"files": ["a"]}', b'{"files": {"a": 1}}'])
async def test_other_manifest_format_is_an_ordinary_file(
    file_server: FileServer, tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file_server.files = {"a": b"x", "manifest.json": text}
    await get_tree(file_server, tmp_path)
    assert contents(tmp_path / "out") == file_server.files
    assert "files are not verified" in caplog.text


@pytest.mark.asyncio
async def test_existing_directory_is_rejected_before_any_request(
    file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidInput, match="exists already") as caught:
        await get_tree(file_server, tmp_path)
    assert "force" in str(caught.value.hint)
    assert file_server.requests == []
    assert_only(tmp_path, "out")


@pytest.mark.asyncio
async def test_force_keeps_old_directory_until_new_one_is_complete(
    file_server: FileServer, tmp_path: Path
) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "old").write_text("old")
    file_server.files = dict(TREE)
    with pytest.raises(DownloadError):
        await get_tree(file_server, tmp_path, force=True, sizes={"adapter_model.bin": 1})
    assert contents(old) == {"old": b"old"}
    await get_tree(file_server, tmp_path, force=True)
    assert contents(old) == TREE
    assert_only(tmp_path, "out")


@pytest.mark.asyncio
async def test_force_replaces_directories_only(file_server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InvalidInput, match="not a directory that can be replaced"):
        await get_tree(file_server, tmp_path, force=True)
    (tmp_path / "out").unlink()
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(InvalidInput, match="not a directory that can be replaced"):
        await get_tree(file_server, tmp_path, force=True)
    assert file_server.requests == []


@pytest.mark.asyncio
async def test_crash_between_renames_loses_nothing(file_server: FileServer, tmp_path: Path) -> None:
    aside = tmp_path / ".out.replaced"
    aside.mkdir()
    (aside / "old").write_text("old")
    with pytest.raises(InvalidInput, match="exists already"):
        await get_tree(file_server, tmp_path)
    assert contents(tmp_path / "out") == {"old": b"old"}
    assert_only(tmp_path, "out")


@pytest.mark.asyncio
async def test_later_call_resumes_partial_files(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files = dict(TREE)
    urls = file_server.urls()
    del file_server.files["optimizer/state.bin"]
    with pytest.raises(DownloadError, match=r"state\.bin: the server answered 404"):
        await download_directory(fetch, urls, tmp_path / "out", concurrency=1)
    assert_only(tmp_path, ".out.partial")
    partial = contents(tmp_path / ".out.partial")
    assert partial["adapter_model.bin.part"] == DATA
    file_server.files["optimizer/state.bin"] = TREE["optimizer/state.bin"]
    file_server.requests.clear()
    await download_directory(fetch, urls, tmp_path / "out", concurrency=1)
    assert contents(tmp_path / "out") == TREE
    assert_only(tmp_path, "out")
    assert ("adapter_model.bin", "bytes=5020000-") in file_server.requests
    assert ("adapter_model.bin", None) not in file_server.requests


@pytest.mark.asyncio
async def test_partial_files_of_another_checkpoint_are_not_used(
    file_server: FileServer, tmp_path: Path
) -> None:
    staging = tmp_path / ".out.partial"
    (staging / "stale" / "deep").mkdir(parents=True)
    (staging / "stale" / "deep" / "x.part").write_text("stale")
    (staging / "adapter_model.bin.part").write_bytes(DATA[::-1])
    (staging / "adapter_model.bin.part.json").write_text(
        '{"etag": "\\"v0\\"", "num_bytes": 5020000}'
    )
    (staging / "adapter_config.json").write_text("complete, of the other")
    file_server.files = dict(TREE)
    await get_tree(file_server, tmp_path)
    assert contents(tmp_path / "out") == TREE
    assert not (tmp_path / "out" / "stale").exists()
    assert_only(tmp_path, "out")


@pytest.mark.asyncio
async def test_crash_before_last_rename_needs_no_download(
    file_server: FileServer, tmp_path: Path
) -> None:
    staging = tmp_path / ".out.partial"
    staging.mkdir()
    (staging / "model.bin").write_bytes(DATA)
    await get_tree(
        file_server, tmp_path, sizes={"model.bin": len(DATA)}, digests={"model.bin": DIGEST}
    )
    assert file_server.requests == []
    assert contents(tmp_path / "out") == {"model.bin": DATA}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "C:/x", "a\\b", "a\0b", "", ".", "a//b", "./a", "x.part"]
)
async def test_unsafe_names_are_rejected_before_any_request(
    file_server: FileServer, tmp_path: Path, name: str
) -> None:
    files = {"fine": f"{file_server.url}/model.bin", name: f"{file_server.url}/model.bin"}
    with pytest.raises(DownloadError, match=re.escape(repr(name))):
        await download_directory(fetch, files, tmp_path / "out")
    assert file_server.requests == []
    assert_only(tmp_path)


@pytest.mark.asyncio
async def test_file_cannot_be_a_directory(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="'a/b': it conflicts"):
        await download_directory(
            fetch, {"a": file_server.url, "a/b": file_server.url}, tmp_path / "out"
        )
    with pytest.raises(InvalidInput, match="No files to download"):
        await download_directory(fetch, {}, tmp_path / "out")
    assert file_server.requests == []


@pytest.mark.asyncio
async def test_two_downloads_cannot_share_a_directory(
    file_server: FileServer, tmp_path: Path
) -> None:
    file_server.files = dict(TREE)
    results = await asyncio.gather(
        get_tree(file_server, tmp_path), get_tree(file_server, tmp_path), return_exceptions=True
    )
    assert sum(isinstance(result, DownloadError) for result in results) == 1
    assert contents(tmp_path / "out") == TREE


@pytest.mark.asyncio
async def test_dot_means_current_directory(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InvalidInput, match="here' exists already"):
        await download_directory(fetch, file_server.urls(), Path())
    assert file_server.requests == []
