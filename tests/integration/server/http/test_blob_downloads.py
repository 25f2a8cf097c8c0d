"""Checkpoints in object storage, through the API: links, archives, copies, large requests."""

from __future__ import annotations

import base64
import json
import shutil
import tarfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyrage
import pytest

import tinkex
from tests.support.live_server import serve_on_socket
from tests.support.s3_server import S3Bucket
from tests.support.serve_process import eventually
from tests.support.server_harness import BASE_MODEL, KEY, ServerHarness, open_harness
from tinkex import RestClient, ServiceClient
from tinkex.checkpoint.manifest import read_manifest
from tinkex.checkpoint.places import STORE_ID_KEY
from tinkex.client.download.partial_file import INFO_SUFFIX, PART_SUFFIX
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import BaseModel
from tinkex.errors import InternalServerError
from tinkex.ids import parse_tinker_path
from tinkex.jobs.housekeeping import HousekeepingPolicy
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.models import TINY_FOLDER
from tinkex.server.http.model_specs import find_model, list_served_models
from tinkex.server.http.model_tokenizers import load_served_tokenizer
from tinkex.server.wiring import open_blobs
from tinkex.store import checkpoints, groups, jobs
from tinkex.store.database import Database
from tinkex.store.records import CheckpointRecord
from tinkex.tokenizer_files import digest_files, read_tokenizer_files

TIMEOUT_SECONDS = 60.0


@pytest.fixture
def harness(tmp_path: Path, s3: S3Bucket) -> Iterator[ServerHarness]:
    with open_harness(tmp_path / "home", blobs=s3.url) as opened:
        opened.services.storage.cache.store.create(STORE_ID_KEY, b"tests")
        yield opened


class EngineWithTokenizer(FakeEngine):
    """Its tokenizer is in a folder that the API cannot read."""

    def __init__(self, models: list[str], folder: Path) -> None:
        super().__init__(models)
        self.folder = folder
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY_FOLDER / name, folder)

    def base_models(self) -> Sequence[BaseModel]:
        folder = str(self.folder)
        return [replace(model, tokenizer_folder=folder) for model in super().base_models()]


@pytest.fixture
def url(harness: ServerHarness, tmp_path: Path) -> Iterator[str]:
    """A server and a worker that share no disk, only the stores."""
    services = harness.services
    database = Database(services.config.store_url)
    other_home = services.home._replace(root=tmp_path / "worker")
    worker = Worker(
        database=database,
        engine=EngineWithTokenizer([BASE_MODEL], tmp_path / "tokenizer"),
        home=other_home,
        config=WorkerConfig(owner="test", housekeeping=HousekeepingPolicy(interval_seconds=0.05)),
        blobs=open_blobs(replace(services.config, home=other_home.root)),
    )
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    with serve_on_socket(harness) as address:
        yield address
    worker.stop()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()
    database.close()


def record_at(harness: ServerHarness, path: str) -> CheckpointRecord:
    record = harness.read(lambda db: checkpoints.find(db, parse_tinker_path(path), 0.0))
    assert record is not None
    return record


def save(url: str, **options: Any) -> str:
    with ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        return client.save_weights_external("saved", **options).result(TIMEOUT_SECONDS).path


def test_files_are_downloaded_from_the_object_store(
    harness: ServerHarness, url: str, s3: S3Bucket, tmp_path: Path
) -> None:
    path = save(url)
    rest = RestClient(base_url=url, api_key=KEY)
    links = rest.get_external_weights_urls(path).result(TIMEOUT_SECONDS).urls
    endpoint = urlsplit(s3.environment["AWS_ENDPOINT_URL"]).netloc
    assert {urlsplit(link).netloc for link in links.values()} == {endpoint}
    assert "manifest.json" in links
    name = next(name for name in links if name.endswith(".safetensors"))
    with urllib.request.urlopen(links[name], timeout=10) as answer:
        content, etag = answer.read(), answer.headers["etag"]
    # A download that was interrupted: its first bytes are here, and are not sent again.
    part = tmp_path / ".target.partial" / name
    part.parent.mkdir()
    part.with_name(name + PART_SUFFIX).write_bytes(content[:-10])
    info = {"etag": etag, "num_bytes": len(content)}
    part.with_name(name + INFO_SUFFIX).write_text(json.dumps(info))
    num_received = s3.door.num_received
    target = rest.download_checkpoint(path, tmp_path / "target").result(TIMEOUT_SECONDS)
    assert (target / name).read_bytes() == content
    assert s3.door.num_received - num_received < len(content)
    assert read_manifest(target).files.keys() | {"manifest.json"} == links.keys()
    # The API has read none of the files.
    assert not list(harness.services.home.blob_cache.glob("checkpoints*"))


def test_archive_goes_through_the_api(harness: ServerHarness, url: str, tmp_path: Path) -> None:
    path = save(url)
    rest = RestClient(base_url=url, api_key=KEY)
    target = tmp_path / "saved.tar"
    rest.download_checkpoint(path, target, extract=False).result(TIMEOUT_SECONDS)
    with tarfile.open(target) as archive:
        names = set(archive.getnames())
    assert names == set(rest.get_external_weights_urls(path).result(TIMEOUT_SECONDS).urls)


def test_encrypted_export_is_decrypted_by_the_client(url: str, tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "key.txt").write_text(f"{identity}\n")
    path = save(url, age_encryption_recipients=[str(identity.to_public())])
    rest = RestClient(base_url=url, api_key=KEY)
    links = rest.get_external_weights_urls(path).result(TIMEOUT_SECONDS).urls
    assert all(name.endswith(".age") for name in links)
    target = rest.download_checkpoint(
        path, tmp_path / "target", identity=tmp_path / "key.txt"
    ).result(TIMEOUT_SECONDS)
    assert read_manifest(target).files


def test_links_go_through_the_api_if_configured(tmp_path: Path, s3: S3Bucket, url: str) -> None:
    path = save(url)
    with (
        open_harness(tmp_path / "home", blobs=s3.url, blob_links=False) as other,
        serve_on_socket(other) as address,
    ):
        rest = RestClient(base_url=address, api_key=KEY)
        links = rest.get_external_weights_urls(path).result(TIMEOUT_SECONDS).urls
        assert all(link.startswith(address) for link in links.values())
        rest.download_checkpoint(path, tmp_path / "target").result(TIMEOUT_SECONDS)


def test_damage_is_reported_with_the_links(harness: ServerHarness, url: str) -> None:
    path = save(url)
    store, place = harness.services.storage.cache.store, record_at(harness, path).place
    name = next(iter(store.read_manifest(place).files))
    store._delete([f"{place}/{name}"])
    with pytest.raises(InternalServerError, match=f"'{name}' is missing in the object store"):
        RestClient(base_url=url, api_key=KEY).get_external_weights_urls(path).result(
            TIMEOUT_SECONDS
        )


def test_copy_shares_the_place(harness: ServerHarness, url: str) -> None:
    path = save(url)
    rest = RestClient(base_url=url, api_key=KEY)
    copied = rest.copy_weights(path).result(TIMEOUT_SECONDS)
    source, copy = record_at(harness, path), record_at(harness, copied)
    store = harness.services.storage.cache.store
    assert source.place == copy.place != ""
    assert list(store.list_places()) == [source.place]
    rest.delete_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)
    eventually(lambda: source.id not in harness.read(checkpoints.list_ids))
    rest.get_external_weights_urls(copied).result(TIMEOUT_SECONDS)
    rest.delete_checkpoint_from_tinker_path(copied).result(TIMEOUT_SECONDS)
    eventually(lambda: list(store.list_places()) == [])


def large_datum() -> tinkex.Datum:
    tokens = [1, 2, 3, 4] * 6000
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


def test_large_requests_are_stored_as_objects(harness: ServerHarness, url: str) -> None:
    store = harness.services.storage.cache.store
    with ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        client.forward_backward([large_datum()], "cross_entropy").result(TIMEOUT_SECONDS)
        payloads = harness.read(
            lambda db: jobs.list_changes_after(db, client.model_id, 0, limit=10)
        )
        (place,) = [job.payload_ref for job, _ in payloads if job.payload_ref]
        assert [payload for job, payload in payloads if job.payload_ref] == [b""]
        assert len(store.read_payload(place)) > 64 * 1024
        client.forward([large_datum()], "cross_entropy").result(TIMEOUT_SECONDS)
        # A forward pass is not replayed.
        eventually(lambda: list(store.list_places()) == [place])


def test_large_request_waits_for_the_object_store(
    harness: ServerHarness, s3: S3Bucket, url: str
) -> None:
    with ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        s3.door.close()
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1] * 20_000}]},
            "loss_fn_inputs": {"target_tokens": {"data": [1] * 20_000, "dtype": "int64"}},
        }
        inputs = {"data": [datum], "loss_fn": "cross_entropy"}
        body = {"model_id": client.model_id, "seq_id": 100, "forward_backward_input": inputs}
        answer = harness.post("/forward_backward", body)
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "1"
        assert "object store is unavailable" in answer.text
        # The SDK waits.
        future = client.forward_backward([large_datum()], "cross_entropy")
        with pytest.raises(TimeoutError):
            future.result(0.5)
        s3.door.open()
        future.result(TIMEOUT_SECONDS)


def test_tokenizer_needs_no_shared_folder(harness: ServerHarness, url: str, tmp_path: Path) -> None:
    assert url
    query = f"/tokenizer?base_model={BASE_MODEL}"
    expected = read_tokenizer_files(tmp_path / "tokenizer")
    digest = digest_files(expected)
    store = harness.services.storage.cache.store
    eventually(lambda: f"tokenizers/{digest}" in {key for key, _, _ in store._list("tokenizers")})
    eventually(lambda: _served_model(harness)["tokenizer_digest"] == digest)
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    assert harness.send_request("GET", query).json()["digest"] == digest
    files = harness.send_request("GET", f"{query}&digest={digest}").json()["files"]
    assert {name: base64.b64decode(text) for name, text in files.items()} == expected
    base = harness.read(lambda db: find_model(list_served_models(db), BASE_MODEL))
    assert base is not None
    services = harness.services
    tokenizer = load_served_tokenizer(services.storage, services.home, base)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert load_served_tokenizer(services.storage, services.home, base) is tokenizer
    assert (services.home.tokenizers / digest).is_dir()


def _served_model(harness: ServerHarness) -> Any:
    group = harness.read(lambda db: groups.find(db, ""))
    return group.base_models[0] if group is not None else {"tokenizer_digest": None}
