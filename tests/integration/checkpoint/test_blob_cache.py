"""Local copies of objects: limits, pins, two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tinkex.checkpoint.blob_cache import BlobCache
from tinkex.checkpoint.blobs import BlobStore
from tinkex.checkpoint.manifest import write_manifest
from tinkex.checkpoint.places import STORE_ID_KEY, BlobPending, new_place
from tinkex.checkpoint.storage import FileStorage
from tinkex.errors import CheckpointError
from tinkex.home import Home

SIZE = 10_000
#: Room for two copies with their manifests.
MAX_BYTES = 25_000


class CountingStore(BlobStore):
    """Counts downloads."""

    num_downloads = 0

    def download(self, place: str, *args: object) -> None:
        self.num_downloads += 1
        super().download(place, *args)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    store = CountingStore(f"file://{tmp_path}/objects")
    store.create(STORE_ID_KEY, b"tests")
    return store


@pytest.fixture
def cache(store: CountingStore, tmp_path: Path) -> BlobCache:
    return BlobCache(store, tmp_path / "cache", MAX_BYTES)


def upload(store: BlobStore, tmp_path: Path, name: str) -> str:
    directory = tmp_path / f"source-{name}"
    directory.mkdir()
    (directory / "weights").write_bytes(os.urandom(SIZE))
    write_manifest(directory)
    place = new_place("checkpoints", name)
    store.upload(place, directory)
    return place


def local_places(cache: BlobCache, places: list[str]) -> list[bool]:
    return [cache.local_path(place).is_dir() for place in places]


def test_least_recently_used_copies_go_first(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    places = [upload(store, tmp_path, name) for name in "abc"]
    for place in (places[0], places[1], places[0], places[2]):
        cache.pin(place).close()
    assert store.num_downloads == 3
    assert local_places(cache, places) == [True, False, True]
    cache.pin(places[1]).close()
    assert store.num_downloads == 4


def test_pinned_copies_stay(cache: BlobCache, store: CountingStore, tmp_path: Path) -> None:
    places = [upload(store, tmp_path, name) for name in "abcd"]
    pins = [cache.pin(place) for place in places]
    assert local_places(cache, places) == [True] * 4
    for pin in pins:
        assert (pin.directory / "weights").stat().st_size == SIZE
        pin.close()
    cache.evict()
    assert sum(local_places(cache, places)) == 2


def test_pins_of_other_processes_count(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    places = [upload(store, tmp_path, name) for name in "abc"]
    cache.pin(places[0]).close()
    script = (
        "import os, sys, fcntl; d = os.open(sys.argv[1], os.O_RDONLY); "
        "fcntl.flock(d, fcntl.LOCK_SH); print('locked', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, str(cache.local_path(places[0]))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for place in places[1:]:
            cache.pin(place).close()
        cache.evict()
        assert local_places(cache, places)[0]
        other.communicate("", timeout=60)
    cache.pin(places[2]).close()
    cache.pin(places[1]).close()
    assert local_places(cache, places) == [False, True, True]


def test_threads_download_a_place_once(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    place = upload(store, tmp_path, "a")
    threads = [threading.Thread(target=lambda: cache.pin(place).close()) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.num_downloads == 1


def test_two_caches_of_one_home_agree(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    other = BlobCache(store, tmp_path / "cache", MAX_BYTES)
    places = [upload(store, tmp_path, name) for name in "abcd"]

    def read_all(one: BlobCache) -> None:
        for place in places * 5:
            pin = one.pin(place)
            assert (pin.directory / "weights").stat().st_size == SIZE
            pin.close()

    errors: list[BaseException] = []

    def run(one: BlobCache) -> None:
        try:
            read_all(one)
        except BaseException as error:  # noqa: BLE001 - the test reports it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in (cache, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_copy_that_disappears_does_not_disturb_eviction(
    cache: BlobCache, store: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = upload(store, tmp_path, "a")
    cache.pin(place).close()
    scandir = os.scandir

    def scandir_after_removal(path: os.PathLike[str]) -> object:
        if Path(path) == cache.local_path(place):
            (Path(path) / "weights").unlink(missing_ok=True)
            cache.local_path(place).rename(tmp_path / "removed")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_after_removal)
    cache.evict()
    assert (tmp_path / "removed").is_dir()


def test_damaged_object_is_read_twice_and_never_kept(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    place = upload(store, tmp_path, "a")
    (tmp_path / "objects" / place / "weights").write_bytes(bytes(SIZE))
    with pytest.raises(CheckpointError, match="'weights' is damaged"):
        cache.pin(place)
    assert store.num_downloads == 2
    assert local_places(cache, [place]) == [False]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_copy_is_pinned_until_it_is_uploaded(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    storage = FileStorage(Home(tmp_path / "home"), cache)
    with storage.new_checkpoint("large") as files:
        (files.directory / "weights").write_bytes(bytes(2 * MAX_BYTES))
        write_manifest(files.directory)
    cache.evict()
    files.upload()
    cache.evict()
    assert local_places(cache, [files.place]) == [False]
    with storage.open_checkpoint("large", files.place, "large") as directory:
        assert (directory / "weights").stat().st_size == 2 * MAX_BYTES


def test_callers_with_transfers_do_not_wait(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    place = upload(store, tmp_path, "a")
    woken = threading.Event()
    storage = FileStorage(Home(tmp_path / "home"), cache, wake=woken.set)
    with pytest.raises(BlobPending):
        storage.pin_checkpoint("a", place, "a")
    assert woken.wait(60)
    storage.pin_checkpoint("a", place, "a").close()
    assert store.num_downloads == 1
    storage.close()


def test_two_writers_of_one_save_never_share_a_place(
    cache: BlobCache, store: CountingStore, tmp_path: Path
) -> None:
    homes = [Home(tmp_path / name) for name in ("zombie", "successor")]
    caches = [BlobCache(store, home.blob_cache, MAX_BYTES) for home in homes]
    written = []
    for content, (home, own) in enumerate(zip(homes, caches, strict=True)):
        with FileStorage(home, own).new_checkpoint("job") as files:
            (files.directory / "weights").write_bytes(bytes([content]) * SIZE)
            write_manifest(files.directory)
        written.append(files)
    for files in reversed(written):  # the one that lost its lease comes last
        files.upload()
    reader = FileStorage(Home(tmp_path / "reader"), cache)
    with reader.open_checkpoint("job", written[1].place, "job") as directory:
        assert (directory / "weights").read_bytes() == b"\1" * SIZE
    assert len(store.list_places()) == 2
