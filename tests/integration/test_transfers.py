"""Large transfers: compressed batches and checkpoint downloads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    KEY,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    base_logprobs,
    datum,
)
from tinkex import (
    AdamParams,
    APIConnectionError,
    APIResponseValidationError,
    DownloadError,
    InvalidInput,
    NotFoundError,
    RestClient,
    ServiceClient,
)
from tinkex.testing import Fault, StubServer

# --- uploads ----------------------------------------------------------------------------------


def test_batches_are_compressed_if_server_enables_it(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"proto_compress_fwdbwd": True})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    output = client.forward_backward([datum()] * 1500, "cross_entropy").result(TIMEOUT_SECONDS)
    assert output.metrics["loss:sum"] == pytest.approx(-1500 * base_logprobs(HELLO).sum())
    calls = server.calls("forward_backward")
    assert [call.headers.get("content-encoding") for call in calls] == ["zstd", "zstd"]
    assert all(len(call.body) < len(call.unpacked_body()) / 4 for call in calls)


def test_small_batch_is_not_compressed(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"proto_compress_fwdbwd": True})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.forward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    (call,) = server.calls("forward_backward")
    assert "content-encoding" not in call.headers


def test_compressed_batch_survives_lost_response(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"proto_compress_fwdbwd": True})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    server.inject("forward_backward", Fault(drop_after=True))
    client.forward_backward([datum()] * 500, "cross_entropy").result(TIMEOUT_SECONDS)
    first, second = server.calls("forward_backward")
    assert first.body == second.body
    assert len(server.executed) == 1


@pytest.mark.parametrize("is_parallel", [False, True])
def test_concurrent_chunks_give_same_result(
    serve: Serve, connect: Connect, is_parallel: bool
) -> None:
    flags = {"parallel_fwdbwd_chunks": is_parallel, "proto_compress_fwdbwd": True}
    server = serve(client_config={**flags, "fwdbwd_max_chunk_len": 100})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    rows = [[index % 256, index // 256, 3] for index in range(1000)]
    passed = client.forward_backward([datum(row) for row in rows], "cross_entropy")
    stepped = client.optim_step(AdamParams(learning_rate=0.1))
    got = [row["logprobs"].tolist() for row in passed.result(TIMEOUT_SECONDS).loss_fn_outputs]
    assert got == [pytest.approx(base_logprobs(row).tolist(), rel=1e-4) for row in rows]
    assert stepped.result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    assert [number for _, number, _ in server.executed] == list(range(1, 12))


def test_budget_smaller_than_chunk_does_not_block(serve: Serve, connect: Connect) -> None:
    flags = {"parallel_fwdbwd_chunks": True, "fwdbwd_max_chunk_len": 10}
    server = serve(client_config={**flags, "fwdbwd_dispatch_bytes_semaphore_size": 1})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    client.forward_backward([datum()] * 100, "cross_entropy").result(TIMEOUT_SECONDS)
    assert len(server.calls("forward_backward")) == 10


# --- downloads --------------------------------------------------------------------------------


@pytest.fixture
def saved(service: ServiceClient) -> str:
    client = service.create_lora_training_client(BASE_MODEL, rank=4)
    return client.save_weights_external("out").result(TIMEOUT_SECONDS).path


@pytest.fixture
def rest(server: StubServer) -> RestClient:
    return RestClient(base_url=server.url, api_key=KEY)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_downloaded_checkpoint_has_all_files(
    server: StubServer, rest: RestClient, saved: str, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = tmp_path / "weights"
    done = rest.download_checkpoint(
        saved, folder, progress=lambda now, total: seen.append((now, total))
    )
    assert done.result(TIMEOUT_SECONDS) == folder
    urls = rest.get_external_weights_urls(saved).result(TIMEOUT_SECONDS).urls
    assert digests(folder).keys() == urls.keys()
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert seen[-1] == (num_bytes, num_bytes)
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert server.calls("checkpoint_archive") == []


def test_interrupted_download_is_resumed(
    server: StubServer, rest: RestClient, saved: str, tmp_path: Path
) -> None:
    """The official client reports 500 of 100,000 bytes as a success."""
    plain = rest.download_checkpoint(saved, tmp_path / "plain").result(TIMEOUT_SECONDS)
    largest = max(plain.rglob("*"), key=lambda path: path.stat().st_size)
    cut = Fault(cut_after_bytes=5000)
    server.inject("download", cut, times=2, match=lambda call: largest.name in call.path)
    broken = rest.download_checkpoint(saved, tmp_path / "broken").result(TIMEOUT_SECONDS)
    assert digests(broken) == digests(plain)
    ranges = [
        call.headers.get("range") for call in server.calls("download") if largest.name in call.path
    ][1:]
    assert ranges[0] in {None, "bytes=0-"}
    assert ranges[1] == "bytes=5000-"


def test_failed_download_leaves_no_partial_directory(
    server: StubServer, connect: Connect, saved: str, tmp_path: Path
) -> None:
    rest = connect(server, outage_seconds=0.2, max_retries=1).rest_client()
    server.inject("download", Fault(status=404), times=None)
    with pytest.raises((NotFoundError, DownloadError, APIConnectionError)):
        rest.download_checkpoint(saved, tmp_path / "weights").result(TIMEOUT_SECONDS)
    assert not (tmp_path / "weights").exists()


def test_existing_destination_is_not_overwritten_without_force(
    server: StubServer, rest: RestClient, saved: str, tmp_path: Path
) -> None:
    """With force, the old one stays until the new one is complete."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(InvalidInput, match="exists already"):
        rest.download_checkpoint(saved, folder).result(TIMEOUT_SECONDS)
    server.inject("external_weights_urls", Fault(status=400, body={"detail": "no"}), times=None)
    server.inject("checkpoint_archive", Fault(status=404), times=None)
    with pytest.raises(Exception, match="no"):
        rest.download_checkpoint(saved, folder, force=True).result(TIMEOUT_SECONDS)
    assert (folder / "mine.txt").read_text() == "keep"
    server.clear_faults()
    rest.download_checkpoint(saved, folder, force=True).result(TIMEOUT_SECONDS)
    assert not (folder / "mine.txt").exists()
    assert (folder / "adapter_config.json").exists()


def test_key_is_not_sent_to_other_hosts(
    serve: Serve, server: StubServer, rest: RestClient, saved: str, tmp_path: Path
) -> None:
    elsewhere = serve()
    urls = rest.get_external_weights_urls(saved).result(TIMEOUT_SECONDS)
    moved = {name: url.replace(server.url, elsewhere.url) for name, url in urls.urls.items()}
    answer = {"urls": moved, "expires": urls.expires.isoformat()}
    server.inject("external_weights_urls", Fault(status=200, body=answer))
    assert rest.download_checkpoint(saved, tmp_path / "x").exception(TIMEOUT_SECONDS) is not None
    assert elsewhere.calls("download")
    assert all(call.api_key is None for call in elsewhere.calls())


def test_training_checkpoint_is_downloaded_as_archive(
    service: ServiceClient, rest: RestClient, tmp_path: Path
) -> None:
    """Unlike the official tool, it starts no session."""
    client = service.create_lora_training_client(BASE_MODEL, rank=2)
    path = client.save_state("state").result(TIMEOUT_SECONDS).path
    folder = rest.download_checkpoint(path, tmp_path / "state").result(TIMEOUT_SECONDS)
    assert (folder / "adapter_config.json").exists()


def test_corrupt_archive_is_typed_error_and_leaves_nothing(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    # A server without links to single files.
    server = serve(dialect="tuft")
    service = connect(server)
    rest = service.rest_client()
    client = service.create_lora_training_client(BASE_MODEL)
    path = client.save_state("state").result(TIMEOUT_SECONDS).path
    server.inject("download", Fault(status=200, body=b"not a tar" * 100), times=None)
    with pytest.raises(DownloadError):
        rest.download_checkpoint(path, tmp_path / "state").result(TIMEOUT_SECONDS)
    assert not (tmp_path / "state").exists()


def test_client_limits_unsized_files(
    server: StubServer, connect: Connect, saved: str, tmp_path: Path
) -> None:
    """The manifest has no declared size here and counts too."""
    rest = connect(server, max_unsized_download_bytes=100).rest_client()
    server.inject("download", Fault(chunked=True), times=None)
    with pytest.raises(DownloadError, match="at most 100 are accepted"):
        rest.download_checkpoint(saved, tmp_path / "weights").result(TIMEOUT_SECONDS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_client_limits_unsized_archive(
    server: StubServer, service: ServiceClient, connect: Connect, tmp_path: Path
) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    path = client.save_state("state").result(TIMEOUT_SECONDS).path
    rest = connect(server, max_unsized_download_bytes=100).rest_client()
    server.inject("external_weights_urls", Fault(status=404), times=None)
    server.inject("download", Fault(chunked=True), times=None)
    for extract in (True, False):
        with pytest.raises(DownloadError, match="at most 100 are accepted"):
            rest.download_checkpoint(path, tmp_path / "out", extract=extract).result(
                TIMEOUT_SECONDS
            )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_oversized_archive_reply_is_rejected(
    server: StubServer, rest: RestClient, saved: str, tmp_path: Path
) -> None:
    server.inject("external_weights_urls", Fault(status=404), times=None)
    json_type = {"content-type": "application/json"}
    reply = Fault(status=200, headers=json_type, body=b" " * (2**20 + 1))
    server.inject("checkpoint_archive", reply, times=None)
    with pytest.raises(APIResponseValidationError, match="at most 1,048,576 are accepted"):
        rest.download_checkpoint(saved, tmp_path / "out").result(TIMEOUT_SECONDS)
