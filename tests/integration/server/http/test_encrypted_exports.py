"""Encrypted exports: every offered file is encrypted, and the server detects damage."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyrage
import pytest

from tests.support.live_server import serve_on_socket
from tests.support.resources import FILES, create_checkpoint, create_ready_model
from tests.support.server_harness import BASE_MODEL, KEY, ServerHarness
from tinkex import (
    DownloadError,
    InvalidInput,
    RestClient,
    ServiceClient,
)
from tinkex.checkpoint.encryption import encrypt_directory
from tinkex.checkpoint.manifest import (
    SERVER_MANIFEST_NAME,
    VerifiedCheckpoints,
    check_manifest,
    downloadable_names,
    write_manifest,
)
from tinkex.engine.fake.engine import FakeEngine
from tinkex.errors import InternalServerError, RequestErrorCategory
from tinkex.ids import parse_tinker_path
from tinkex.jobs.worker import Worker
from tinkex.jobs.worker_config import WorkerConfig
from tinkex.server.http.checkpoint_copies import copy_files
from tinkex.server.http.downloads import FileArea, FileRef, sign_url
from tinkex.store import checkpoints
from tinkex.store.database import Database

MAGIC = b"age-encryption.org/v1\n"
TIMEOUT_SECONDS = 20.0


@pytest.fixture
def url(harness: ServerHarness) -> Iterator[str]:
    """The server with a worker, at this URL."""
    services = harness.services
    database = Database(services.config.store_url)
    worker = Worker(
        database=database,
        engine=FakeEngine([BASE_MODEL]),
        home=services.home,
        config=WorkerConfig(owner="test"),
    )
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    with serve_on_socket(harness) as address:
        yield address
    worker.stop()
    thread.join(TIMEOUT_SECONDS)
    database.close()


@pytest.fixture
def identity(tmp_path: Path) -> Any:
    made = pyrage.x25519.Identity.generate()
    (tmp_path / "key.txt").write_text(f"{made}\n")
    return made


@pytest.fixture
def exported(url: str, identity: Any) -> dict[str, str]:
    """The paths of one model's exports: plain and encrypted."""
    with ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=4)
        plain = client.save_weights_external("plain").result(TIMEOUT_SECONDS).path
        recipients = [str(identity.to_public())]
        locked = client.save_weights_external("locked", age_encryption_recipients=recipients)
        return {"plain": plain, "locked": locked.result(TIMEOUT_SECONDS).path}


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def directory_of(harness: ServerHarness, path: str) -> Path:
    record = harness.read(lambda db: checkpoints.find(db, parse_tinker_path(path), 0.0))
    return harness.services.home.checkpoint_directory(record.id)


def test_every_offered_file_is_encrypted_and_decrypts_to_the_same_bytes(
    url: str, exported: dict[str, str], tmp_path: Path
) -> None:
    rest = RestClient(base_url=url, api_key=KEY)
    names = rest.get_external_weights_urls(exported["locked"]).result(TIMEOUT_SECONDS).urls.keys()
    locked = rest.download_checkpoint(exported["locked"], tmp_path / "locked").result(
        TIMEOUT_SECONDS
    )
    assert contents(locked).keys() == names
    assert "manifest.json.age" in names
    assert [name for name, data in contents(locked).items() if not data.startswith(MAGIC)] == []
    archive = tmp_path / "locked.tar"
    rest.download_checkpoint(exported["locked"], archive, extract=False).result(TIMEOUT_SECONDS)
    with tarfile.open(archive) as tar:
        packed = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert packed == contents(locked)

    plain = rest.download_checkpoint(exported["plain"], tmp_path / "plain").result(TIMEOUT_SECONDS)
    opened = rest.download_checkpoint(
        exported["locked"], tmp_path / "opened", identity=tmp_path / "key.txt"
    ).result(TIMEOUT_SECONDS)
    assert contents(opened) == contents(plain)
    assert check_manifest(opened).files
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_manifest_has_no_url(harness: ServerHarness, url: str, exported: dict[str, str]) -> None:
    directory = directory_of(harness, exported["locked"])
    assert (directory / SERVER_MANIFEST_NAME).is_file()
    assert not (directory / "manifest.json").exists()
    for name in (SERVER_MANIFEST_NAME, "manifest.json"):
        place = FileRef(FileArea.FILE, directory.name, name)
        signed = sign_url(harness.services.secret, "", place, 2**33)
        assert harness.client.get(signed).status_code == 404


def test_damaged_encrypted_byte_is_detected(
    harness: ServerHarness, url: str, exported: dict[str, str], tmp_path: Path
) -> None:
    directory = directory_of(harness, exported["locked"])
    target = directory / "manifest.json.age"
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    rest = RestClient(base_url=url, api_key=KEY)
    path = exported["locked"]
    with pytest.raises(InternalServerError, match=f"{path} is damaged on the server") as caught:
        rest.download_checkpoint(path, tmp_path / "out").result(TIMEOUT_SECONDS)
    assert caught.value.category == RequestErrorCategory.Server
    assert not caught.value.retryable


def test_copy_of_encrypted_export_is_verified(
    harness: ServerHarness, exported: dict[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy_files(directory_of(harness, exported["locked"]), copy)
    VerifiedCheckpoints().verify(copy, "copy")
    assert [name for name in downloadable_names(copy) if not name.endswith(".age")] == []


def test_export_of_older_server_is_decrypted(
    harness: ServerHarness, url: str, identity: Any, tmp_path: Path
) -> None:
    """Earlier versions offered the manifest of the encrypted files unencrypted."""
    checkpoint = create_checkpoint(
        harness, create_ready_model(harness, harness.session()), segment="external_weights"
    )
    directory = harness.services.home.checkpoint_directory(checkpoint.id)
    (directory / "manifest.json").unlink()
    encrypt_directory(directory, [str(identity.to_public())])
    write_manifest(directory)
    rest = RestClient(base_url=url, api_key=KEY)
    path = str(checkpoint.path)
    locked = rest.download_checkpoint(path, tmp_path / "locked").result(TIMEOUT_SECONDS)
    assert check_manifest(locked).files.keys() == {f"{name}.age" for name in FILES}
    opened = rest.download_checkpoint(
        path, tmp_path / "opened", identity=tmp_path / "key.txt"
    ).result(TIMEOUT_SECONDS)
    assert check_manifest(opened).files.keys() == FILES.keys()
    assert {name: contents(opened)[name] for name in FILES} == FILES


def test_wrong_identity_leaves_no_files(url: str, exported: dict[str, str], tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.txt"
    stranger.write_text(f"{pyrage.x25519.Identity.generate()}\n")
    rest = RestClient(base_url=url, api_key=KEY)
    with pytest.raises(
        DownloadError, match=r"Cannot decrypt the checkpoint: '.*\.age' cannot"
    ) as caught:
        rest.download_checkpoint(exported["locked"], tmp_path / "out", identity=stranger).result()
    assert "one of the recipients" in (caught.value.hint or "")
    with pytest.raises(InvalidInput, match="the checkpoint is not encrypted"):
        rest.download_checkpoint(exported["plain"], tmp_path / "out", identity=stranger).result()
    with pytest.raises(InvalidInput, match="cannot decrypt an archive"):
        rest.download_checkpoint(
            exported["locked"], tmp_path / "out", identity=stranger, extract=False
        ).result()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["home", "key.txt", "stranger.txt"]
