from __future__ import annotations

import asyncio
import io
import socket
import tarfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.live_server import serve_on_socket
from tests.support.resources import (
    FILES,
    checkpoint_url,
    create_checkpoint,
    create_ready_model,
    publish_checkpoint,
)
from tests.support.server_harness import KEY, OTHER_KEY, ServerHarness
from tinkex import RestClient
from tinkex.checkpoint.manifest import VerifiedCheckpoints, write_manifest
from tinkex.client.download.directory import download_directory
from tinkex.client.download.transfer import ResponseStream
from tinkex.server.app import create_app
from tinkex.server.http.downloads import FileArea, FileRef, sign_url
from tinkex.store import checkpoints, jobs, steps
from tinkex.store.records import CheckpointRecord, StepRecord

BIG = "adapter_model.safetensors"


@pytest.fixture
def checkpoint(harness: ServerHarness) -> CheckpointRecord:
    return create_checkpoint(harness, create_ready_model(harness, harness.session()))


def links(harness: ServerHarness, checkpoint: CheckpointRecord, **options: Any) -> dict[str, str]:
    answer = harness.send_request(
        "GET", checkpoint_url(checkpoint, "/external_weights_urls"), **options
    )
    assert answer.status_code == 200, answer.text
    urls: dict[str, str] = answer.json()["urls"]
    return urls


def fetch(harness: ServerHarness, url: str, method: str = "GET", **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    parts = urlsplit(url)
    return harness.client.request(method, f"{parts.path}?{parts.query}", headers=given)


# --- links ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("segment", ["weights", "sampler_weights", "external_weights"])
def test_signed_url_needs_no_key(harness: ServerHarness, segment: str) -> None:
    checkpoint = create_checkpoint(
        harness, create_ready_model(harness, harness.session()), segment=segment
    )

    urls = links(harness, checkpoint)

    assert set(urls) == {*FILES, "manifest.json"}
    for name, content in FILES.items():
        assert fetch(harness, urls[name]).content == content


def test_signed_url_expires_no_later_than_checkpoint(harness: ServerHarness) -> None:
    run_id = create_ready_model(harness, harness.session())
    soon = time.time() + 60
    lasting, dying = (
        create_checkpoint(harness, run_id, "a"),
        create_checkpoint(harness, run_id, "b", expires_at=soon),
    )

    def expiry(checkpoint: CheckpointRecord) -> float:
        answer = harness.send_request(
            "GET", checkpoint_url(checkpoint, "/external_weights_urls")
        ).json()
        return float(httpx.QueryParams(urlsplit(answer["urls"][BIG]).query)["expires"])

    assert expiry(lasting) > time.time() + harness.services.config.url_seconds - 10
    assert expiry(dying) <= soon


def test_expired_or_tampered_url_is_rejected(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    secret = harness.services.secret
    good = links(harness, checkpoint)[BIG]
    place = FileRef(FileArea.FILE, checkpoint.id, BIG)
    old = sign_url(secret, "", place, int(time.time()) - 1)
    foreign = sign_url(b"another secret", "", place, int(time.time()) + 60)
    path, _, query = good.partition("?")
    wrong = [
        old,
        foreign,
        path,
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        f"{path.replace(BIG, 'adapter_config.json')}?{query}",
        good.replace("expires=", "expires=9"),
        good.replace("expires=", "expires=x"),
        good.replace("/checkpoints/", "/archives/"),
        f"{path}?expires=%D9%A1&signature=%FF",
        f"{path}?{query}" + "&x=y" * 20,
    ]

    for url in wrong:
        answer = fetch(harness, url)
        assert answer.status_code == 403, url
        assert "request a new one" in answer.json()["error"]
    assert "has expired" in fetch(harness, old).json()["error"]


@pytest.mark.parametrize(
    "name",
    ["../store.db", "nothing", "manifest.json/x", ".", "adapter_config.json/..", "/etc/hosts"],
)
def test_file_outside_manifest_is_rejected_even_if_signed(
    harness: ServerHarness, checkpoint: CheckpointRecord, name: str
) -> None:
    url = sign_url(harness.services.secret, "", FileRef(FileArea.FILE, checkpoint.id, name), 2**33)

    assert fetch(harness, url).status_code in {403, 404}


def test_file_outside_manifest_is_not_served(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    (harness.services.home.checkpoint_directory(checkpoint.id) / "stray").write_bytes(b"x")
    url = sign_url(
        harness.services.secret, "", FileRef(FileArea.FILE, checkpoint.id, "stray"), 2**33
    )

    assert fetch(harness, url).status_code == 404


def test_signed_url_fails_after_checkpoint_deletion(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    url = links(harness, checkpoint)[BIG]

    harness.write(lambda db: checkpoints.delete(db, checkpoint.id, time.time()))

    assert fetch(harness, url).status_code == 404


def test_other_tenants_get_urls_of_published_or_shared_checkpoints(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    url = checkpoint_url(checkpoint, "/external_weights_urls")
    assert harness.send_request("GET", url, key=OTHER_KEY).status_code == 404
    lent = {"X-Tinker-Weights-Access-Token": KEY}
    assert links(harness, checkpoint, key=OTHER_KEY, headers=lent)

    publish_checkpoint(harness, checkpoint)

    assert links(harness, checkpoint, key=OTHER_KEY)


# --- ranges --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-100", slice(-100, None)),
        ("bytes=10-19", slice(10, 20)),
        ("bytes=10239-99999", slice(10239, None)),
        ("bytes=-999999", slice(0, None)),
    ],
)
def test_range_request_returns_206(
    harness: ServerHarness, checkpoint: CheckpointRecord, asked: str, part: slice
) -> None:
    url, content = links(harness, checkpoint)[BIG], FILES[BIG]

    answer = fetch(harness, url, range=asked)

    start, stop, _ = part.indices(len(content))
    assert answer.status_code == 206
    assert answer.content == content[part]
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(content)}"
    assert answer.headers["content-length"] == str(stop - start)


@pytest.mark.parametrize("asked", ["bytes=10240-", "bytes=99999-100000", "bytes=-0"])
def test_unsatisfiable_range_returns_416_with_size(
    harness: ServerHarness, checkpoint: CheckpointRecord, asked: str
) -> None:
    answer = fetch(harness, links(harness, checkpoint)[BIG], range=asked)

    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(FILES[BIG])}"


@pytest.mark.parametrize(
    "asked",
    ["bytes=5-2", "bytes=a-b", "bytes=-", "items=0-1", "bytes=0-1,4-5", "bytes=0-" + "9" * 99],
)
def test_invalid_range_returns_full_file(
    harness: ServerHarness, checkpoint: CheckpointRecord, asked: str
) -> None:
    answer = fetch(harness, links(harness, checkpoint)[BIG], range=asked)

    assert (answer.status_code, answer.content) == (200, FILES[BIG])


def test_if_range_mismatch_returns_full_file(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    url = links(harness, checkpoint)[BIG]
    etag = fetch(harness, url).headers["etag"]

    same = fetch(harness, url, range="bytes=5-", if_range=etag)
    other = fetch(harness, url, range="bytes=5-", if_range='"other"')

    assert etag.startswith('"')
    assert (same.status_code, other.status_code) == (206, 200)
    assert other.content == FILES[BIG]


def test_head_request_returns_headers_only(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    url = links(harness, checkpoint)[BIG]

    head, got = fetch(harness, url, "HEAD"), fetch(harness, url)

    assert head.content == b""
    for name in ("content-length", "etag", "accept-ranges", "content-type"):
        assert head.headers[name] == got.headers[name]
    assert fetch(harness, url, "POST").status_code == 405


# --- archives ------------------------------------------------------------------------------------
def test_archive_is_tar_with_range_support(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    answer = harness.send_request(
        "GET", checkpoint_url(checkpoint, "/archive"), headers={"Accept": "application/json"}
    )

    url = answer.json()["url"]
    whole = fetch(harness, url)
    assert whole.headers["content-length"] == str(len(whole.content))
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
        content = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    assert content.keys() == {*FILES, "manifest.json"}
    assert content[BIG] == FILES[BIG]
    assert fetch(harness, url, range="bytes=700-1500").content == whole.content[700:1501]


def test_non_json_request_redirects_to_archive(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    answer = harness.send_request(
        "GET",
        checkpoint_url(checkpoint, "/archive"),
        headers={"Accept": "*/*"},
        follow_redirects=False,
    )

    assert answer.status_code == 302
    assert answer.headers["expires"].endswith("GMT")
    with tarfile.open(
        fileobj=io.BytesIO(fetch(harness, answer.headers["location"]).content)
    ) as tar:
        assert BIG in tar.getnames()


# --- on a real socket ---------------------------------------------------------------------------
def test_tinkex_client_downloads_and_verifies_checkpoint(
    harness: ServerHarness, checkpoint: CheckpointRecord, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    with serve_on_socket(harness) as url:
        rest = RestClient(base_url=url, api_key=KEY)
        rest.download_checkpoint(str(checkpoint.path), target).result(60)

    assert {path.name for path in target.iterdir()} == {*FILES, "manifest.json"}
    assert (target / BIG).read_bytes() == FILES[BIG]


def test_interrupted_download_resumes(
    harness: ServerHarness, checkpoint: CheckpointRecord, tmp_path: Path
) -> None:
    ranges: list[str | None] = []

    @asynccontextmanager
    async def cut_once(url: str, headers: Mapping[str, str]) -> AsyncIterator[ResponseStream]:
        async with (
            httpx.AsyncClient() as client,
            client.stream("GET", url, headers=dict(headers)) as response,
        ):
            if BIG in url:
                ranges.append(headers.get("range"))
            limit = 1000 if BIG in url and len(ranges) == 1 else None
            yield Cut(response, limit)  # type: ignore[misc]

    async def no_wait(_: float) -> None:
        return None

    with serve_on_socket(harness) as url:
        host = urlsplit(url).netloc
        urls = {
            name: urlsplit(link)._replace(scheme="http", netloc=host).geturl()
            for name, link in links(harness, checkpoint).items()
        }
        asyncio.run(download_directory(cut_once, urls, tmp_path / "mine", sleep=no_wait))

    assert ranges == [None, "bytes=1000-"]
    assert (tmp_path / "mine" / BIG).read_bytes() == FILES[BIG]


class Cut:
    """A response whose connection breaks after a number of bytes."""

    def __init__(self, response: httpx.Response, limit: int | None) -> None:
        self.status = response.status_code
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response
        self._limit = limit

    async def chunks(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._response.aiter_bytes():
            yield chunk if left is None else chunk[:left]
            if left is not None:
                raise ConnectionResetError("the line went dead")


def test_damaged_checkpoint_is_not_served(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    url = links(harness, checkpoint)[BIG]
    path = harness.services.home.checkpoint_directory(checkpoint.id) / BIG
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    archive = sign_url(
        harness.services.secret, "", FileRef(FileArea.ARCHIVE, checkpoint.id, "a.tar"), 2**33
    )

    answers = [
        fetch(harness, url),
        fetch(harness, archive),
        harness.send_request("GET", checkpoint_url(checkpoint, "/external_weights_urls")),
    ]

    for answer in answers:
        assert answer.status_code == 500
        assert f"checkpoint {checkpoint.path} is damaged" in answer.json()["error"]
        assert answer.headers["x-should-retry"] == "false"


def test_truncated_file_closes_connection(
    harness: ServerHarness, checkpoint: CheckpointRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = links(harness, checkpoint)[BIG]
    # This happens after the files were verified.
    monkeypatch.setattr(VerifiedCheckpoints, "verify", lambda *_: None)
    (harness.services.home.checkpoint_directory(checkpoint.id) / BIG).write_bytes(b"short")

    with serve_on_socket(harness) as base, socket.create_connection(_address(base)) as line:
        parts = urlsplit(url)
        line.sendall(f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        line.settimeout(60)
        received = b"".join(iter(lambda: line.recv(65536), b""))

    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-length: 10240" in head.lower()
    assert len(body) < 10240


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def test_large_file_is_sent_in_constant_memory(harness: ServerHarness) -> None:
    num_bytes = 96 * 2**20
    checkpoint = create_checkpoint(
        harness, create_ready_model(harness, harness.session()), files={"a": b""}
    )
    directory = harness.services.home.checkpoint_directory(checkpoint.id)
    with (directory / "a").open("wb") as file:
        file.truncate(num_bytes)
    write_manifest(directory)
    url = sign_url(harness.services.secret, "", FileRef(FileArea.FILE, checkpoint.id, "a"), 2**33)
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    path, _, query = url.partition("?")
    scope: Any = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query.encode(),
        "headers": [],
    }
    tracemalloc.start()
    try:
        asyncio.run(create_app(harness.services)(scope, receive, send))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert sent == num_bytes
    assert peak < 4 * 2**20


# --- traces --------------------------------------------------------------------------------------
def test_trace_of_session(harness: ServerHarness) -> None:
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    now = time.time()
    step = StepRecord(
        session_id=session_id,
        run_id=run_id,
        sampler_id=None,
        kind="forward_backward",
        job_id="j1",
        num_tokens=12,
        metrics={"loss:sum": 2.5},
        queued_at=now,
        started_at=now + 1,
        finished_at=now + 3,
    )
    harness.write(lambda db: steps.insert(db, step))

    reply = harness.send_request("GET", f"/sessions/{session_id}/trace_export").json()
    trace = fetch(harness, reply["url"]).json()

    assert reply["status"] == "ready"
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(bar["name"], bar["dur"]) for bar in bars] == [("forward_backward", 2_000_000)]
    waiting = [event["name"] for event in trace["traceEvents"] if event["ph"] == "b"]
    assert waiting == ["forward_backward waits", "create_model waits"]
    assert trace["otherData"]["session_id"] == session_id


def test_pending_jobs_of_session_are_tenant_scoped(harness: ServerHarness) -> None:
    session_id = harness.session()
    create_ready_model(harness, session_id)

    mine = harness.read(
        lambda db: jobs.list_open_by_session(db, harness.tenant_id, session_id, limit=10)
    )
    theirs = harness.read(
        lambda db: jobs.list_open_by_session(db, harness.other_tenant_id, session_id, limit=10)
    )

    assert [job.kind for job in mine] == ["create_model"]
    assert theirs == []


def test_signed_urls_work_when_audit_insert_fails(
    harness: ServerHarness, checkpoint: CheckpointRecord
) -> None:
    full = "SELECT RAISE(ABORT, 'database or disk is full')"
    trigger = f"CREATE TRIGGER full BEFORE INSERT ON audit BEGIN {full}; END"
    harness.write(lambda db: db.exec_driver_sql(trigger) and None)
    assert harness.send_request("POST", checkpoint_url(checkpoint, "/publish")).status_code == 503

    assert fetch(harness, links(harness, checkpoint)[BIG]).content == FILES[BIG]
