"""A store and its object store find each other, and no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import S3Bucket
from tinkex.checkpoint.blob_cache import BlobCache
from tinkex.checkpoint.blobs import BlobStore
from tinkex.errors import ConfigError
from tinkex.server import wiring
from tinkex.server.config import ServerConfig
from tinkex.server.process.home_setup import bind_blobs_to_store
from tinkex.store.database import Database
from tinkex.store.migrations import migrate


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    yield from open_database(tmp_path / "one.db")


@pytest.fixture
def other_database(tmp_path: Path) -> Iterator[Database]:
    yield from open_database(tmp_path / "two.db")


def open_database(path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{path}")
    migrate(database)
    yield database
    database.close()


def cache_of(url: str, tmp_path: Path) -> BlobCache:
    return BlobCache(BlobStore(url), tmp_path / "cache", 1000)


def test_objects_belong_to_one_store(
    database: Database, other_database: Database, blobs_url: str, tmp_path: Path
) -> None:
    cache = cache_of(blobs_url, tmp_path)
    bind_blobs_to_store(cache, database)
    bind_blobs_to_store(cache, database)
    with pytest.raises(ConfigError, match="belong to another store"):
        bind_blobs_to_store(cache, other_database)


def test_store_stays_with_its_objects(database: Database, blobs_url: str, tmp_path: Path) -> None:
    bind_blobs_to_store(None, database)
    bind_blobs_to_store(cache_of(blobs_url, tmp_path), database)
    with pytest.raises(ConfigError, match=f"are in {blobs_url}, but blobs is not set"):
        bind_blobs_to_store(None, database)
    with pytest.raises(ConfigError, match="the files of this store are not there") as caught:
        bind_blobs_to_store(cache_of(f"{blobs_url}-other", tmp_path), database)
    assert blobs_url in str(caught.value.hint)


def test_copied_objects_are_accepted(database: Database, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    bind_blobs_to_store(cache_of(f"file://{old}", tmp_path), database)
    old.rename(new)
    bind_blobs_to_store(cache_of(f"file://{new}", tmp_path), database)


def test_wrong_bucket_is_one_sentence(database: Database, s3: S3Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the bucket does not exist") as caught:
        bind_blobs_to_store(cache_of("s3://no-bucket/x", tmp_path), database)
    assert "AWS_ENDPOINT_URL" in str(caught.value.hint)
    assert s3.url


def test_missing_library_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tinkex.checkpoint.blobs")
    monkeypatch.setitem(sys.modules, "obstore", None)
    config = ServerConfig(home=tmp_path, blobs="s3://bucket/x", engine="fake")
    with pytest.raises(ConfigError, match=r"needs the package obstore; run .*\[blobs\]"):
        wiring.open_blobs(config)
