"""Object stores: places, digests, interrupted uploads, outages, wrong addresses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from tests.support.s3_server import S3Bucket
from tests.support.small_disk import run_on_small_disk
from tinkex.checkpoint import blobs as blobs_module
from tinkex.checkpoint.blobs import BLOB_MANIFEST, BlobStore, describe_failure
from tinkex.checkpoint.manifest import write_manifest
from tinkex.checkpoint.places import STORE_ID_KEY, BlobsUnavailable, new_place, payload_place
from tinkex.errors import CheckpointError, ConfigError

FILES = {"adapter_model.safetensors": os.urandom(3_000), "a/config.json": b"{}"}


@pytest.fixture
def store(blobs_url: str) -> BlobStore:
    return open_store(blobs_url)


def open_store(url: str) -> BlobStore:
    store = BlobStore(url)
    store.create(STORE_ID_KEY, b"tests")
    return store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    write_manifest(directory)
    return directory


def download(store: BlobStore, place: str, target: Path) -> dict[str, bytes]:
    target.mkdir()
    store.download(place, store.read_manifest(place), target)
    paths = [path for path in target.rglob("*") if path.is_file()]
    return {path.relative_to(target).as_posix(): path.read_bytes() for path in paths}


def test_download_returns_what_was_uploaded(store: BlobStore, source: Path, tmp_path: Path) -> None:
    place = new_place("checkpoints", "job")
    store.upload(place, source)
    files = download(store, place, tmp_path / "target")
    assert files == FILES | {"manifest.json": (source / "manifest.json").read_bytes()}
    assert list(store.list_places()) == [place]
    store.check_complete(place, store.read_manifest(place))


def test_large_files_are_uploaded_and_read_in_parts(
    store: BlobStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The smallest part of S3 is 5 MiB.
    monkeypatch.setattr(blobs_module, "PART_BYTES", 5 * 2**20)
    content = os.urandom(11 * 2**20)
    (source / "optimizer.safetensors").write_bytes(content)
    write_manifest(source)
    place = new_place("checkpoints", "job")
    store.upload(place, source)
    assert download(store, place, tmp_path / "target")["optimizer.safetensors"] == content


def test_removed_place_has_no_objects(store: BlobStore, source: Path) -> None:
    other, removed = new_place("checkpoints", "one"), new_place("snapshots", "two")
    store.upload(other, source)
    store.upload(removed, source)
    store.remove(removed)
    store.remove(removed)
    assert list(store.list_places()) == [other]
    with pytest.raises(CheckpointError, match="does not exist"):
        store.read_manifest(removed)


def test_manifest_is_never_replaced(store: BlobStore, source: Path) -> None:
    place = new_place("checkpoints", "job")
    store.upload(place, source)
    store.upload(place, source)  # the response to the first attempt was lost
    (source / "a/config.json").write_bytes(b"other")
    write_manifest(source)
    with pytest.raises(CheckpointError, match="another process"):
        store.upload(place, source)


def test_damage_is_detected(store: BlobStore, source: Path, tmp_path: Path) -> None:
    place = new_place("checkpoints", "job")
    store.upload(place, source)
    store.remove(f"{place}/a")
    store.create(f"{place}/a/config.json", b"{]")
    manifest = store.read_manifest(place)
    with pytest.raises(CheckpointError, match=r"'a/config.json' is damaged"):
        download(store, place, tmp_path / "target")
    store.check_complete(place, manifest)  # the sizes are equal
    store.remove(f"{place}/a")
    with pytest.raises(CheckpointError, match=r"'a/config.json' is missing"):
        store.check_complete(place, manifest)


def test_payload_has_the_digest_in_its_place(store: BlobStore) -> None:
    place = payload_place(b"payload")
    store.create_payload(place, b"payload")
    assert store.read_payload(place) == b"payload"
    other = payload_place(b"other")
    store.create_payload(other, b"damaged")
    with pytest.raises(CheckpointError, match="damaged"):
        store.read_payload(other)


def test_object_without_its_store_is_not_lost(blobs_url: str) -> None:
    # An unmounted disk or an emptied bucket is an outage, not the loss of a checkpoint.
    with pytest.raises(BlobsUnavailable, match="not there"):
        BlobStore(blobs_url).read("checkpoints/one/MANIFEST")


_KILLED_UPLOAD = """
import os, signal, sys
from pathlib import Path
from tinkex.checkpoint import blobs
from tinkex.checkpoint.blobs import BlobStore

class Killed(BlobStore):
    num_puts = 0

    def _put_file(self, key, path, size):
        if self.num_puts == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._put_file(key, path, size)
        self.num_puts += 1

    def create(self, key, content):
        os.kill(os.getpid(), signal.SIGKILL)

Killed(sys.argv[1]).upload(sys.argv[2], Path(sys.argv[3]))
"""


@pytest.mark.parametrize("num_puts", [1, 9], ids=["between files", "before the manifest"])
def test_killed_upload_leaves_no_manifest(
    store: BlobStore, blobs_url: str, source: Path, num_puts: int
) -> None:
    place = new_place("checkpoints", "job")
    words = [blobs_url, place, str(source), str(num_puts)]
    killed = subprocess.run([sys.executable, "-c", _KILLED_UPLOAD, *words], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="does not exist"):
        store.read_manifest(place)
    assert list(store.list_places()) == [place]  # removed later, as an orphan
    # The next attempt has a place of its own.
    store.upload(new_place("checkpoints", "job"), source)


def test_signed_url_serves_ranges(s3: S3Bucket, source: Path) -> None:
    store, place = open_store(s3.url), new_place("checkpoints", "job")
    store.upload(place, source)
    urls = store.sign([f"{place}/adapter_model.safetensors"], 60.0)
    assert urls is not None
    request = urllib.request.Request(urls[0], headers={"range": "bytes=1000-1999"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 206
        assert answer.read() == FILES["adapter_model.safetensors"][1000:2000]


def test_outage_fails_at_once_and_ends(s3: S3Bucket, source: Path) -> None:
    store, place, done = open_store(s3.url), new_place("checkpoints", "job"), set[str]()
    s3.door.close()
    with pytest.raises(BlobsUnavailable, match="cannot be reached"):
        store.upload(place, source, done)
    assert not store.is_available
    with pytest.raises(BlobsUnavailable, match="cannot be reached"):
        store.upload(place, source, done)
    s3.door.open()
    for _ in range(1000):
        try:
            store.upload(place, source, done)
            break
        except BlobsUnavailable:
            signal.sigtimedwait([], 0.02)
    assert store.read_manifest(place).files.keys() == done


def test_wrong_credentials_and_buckets_are_named(
    s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BlobsUnavailable, match="the bucket does not exist"):
        BlobStore("s3://no-such-bucket/prefix").write_probe()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BlobsUnavailable, match="refuses the credentials"):
        BlobStore(s3.url).write_probe()
    s3.door.close()
    with pytest.raises(BlobsUnavailable, match="cannot be reached"):
        BlobStore(s3.url).write_probe()


@pytest.mark.parametrize("url", ["objects", "http://host/x", "s3:bucket", "memory:///", "s3://"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="blobs is"):
        BlobStore(url)


def test_manifest_is_the_last_object(store: BlobStore, source: Path) -> None:
    keys: list[str] = []

    class Recorded(BlobStore):
        def _put_file(self, key: str, path: Path, size: int) -> None:
            keys.append(key)
            super()._put_file(key, path, size)

        def create(self, key: str, content: bytes) -> bool:
            keys.append(key)
            return super().create(key, content)

    place = new_place("checkpoints", "job")
    Recorded(store.url).upload(place, source)
    assert keys[-1] == f"{place}/{BLOB_MANIFEST}"


def test_upload_that_is_killed_between_parts_is_invisible(s3: S3Bucket, source: Path) -> None:
    store, place = open_store(s3.url), new_place("checkpoints", "job")
    (source / "a/optimizer.safetensors").write_bytes(os.urandom(20 * 2**20))
    write_manifest(source)
    s3.door.stop_after = 9 * 2**20  # one part of 8 MiB has arrived
    script = (
        "import sys; from pathlib import Path; from tinkex.checkpoint.blobs import BlobStore; "
        "BlobStore(sys.argv[1]).upload(sys.argv[2], Path(sys.argv[3]))"
    )
    with subprocess.Popen([sys.executable, "-c", script, s3.url, place, str(source)]) as process:
        for _ in range(6000):
            if not s3.door.may_send.wait(0):
                break
            signal.sigtimedwait([], 0.01)
        assert not s3.door.may_send.is_set()
        process.kill()
    s3.door.stop_after = None
    s3.door.may_send.set()
    keys = [key for key, _, _ in store._list(place)]
    assert f"{place}/a/optimizer.safetensors" not in keys
    assert f"{place}/{BLOB_MANIFEST}" not in keys


_FULL_DISK = """
import os, sys
from pathlib import Path
from tests.support.small_disk import leave_free
from tinkex.checkpoint.blobs import BlobStore
from tinkex.checkpoint.places import STORE_ID_KEY, BlobsUnavailable

disk = Path(sys.argv[1])
store = BlobStore(f"file://{disk}/objects")
store.create(STORE_ID_KEY, b"tests")
leave_free(disk, 64 * 1024)
try:
    store.create("checkpoints/a/b/c", bytes(1 << 20))
except BlobsUnavailable as error:
    print(error)
"""


def test_full_object_store_is_named(tmp_path: Path) -> None:
    outcome = run_on_small_disk(tmp_path / "disk", _FULL_DISK)
    assert outcome.stdout == "cannot write checkpoints/a/b/c: the object store is full\n", outcome


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("status code: 507 Insufficient Storage", "the object store is full"),
        ("400: <Code>QuotaExceeded</Code>", "the object store is full"),
        ("<Code>XMinioStorageFull</Code>", "the object store is full"),
        ("status code: 503 Slow Down: <?xml", "the object store answered 503 Slow Down"),
        ("403 Forbidden: <Code>AccessDenied</Code>", "the object store refuses the credentials"),
    ],
)
def test_answers_of_object_stores_are_explained(text: str, reason: str) -> None:
    assert describe_failure(GenericError(text)) == reason
