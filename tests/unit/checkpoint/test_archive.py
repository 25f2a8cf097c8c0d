"""Archives: a valid tar, any byte range, and only listed files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.checkpoint.archive import CHUNK_BYTES, plan_archive, plan_file
from tinkex.checkpoint.manifest import MANIFEST_NAME, write_manifest
from tinkex.errors import CheckpointError

LONG_NAME = "/".join(["deep" * 20] * 3) + "/ünï.bin"
CONTENT = {
    "b.bin": bytes(range(256)) * 6,
    "empty": b"",
    "exact": b"x" * 512,
    LONG_NAME: b"far away",
}


def fill(home: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    write_manifest(home)
    return home


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return fill(tmp_path_factory.mktemp("archive"), CONTENT)


def joined(chunks: Iterator[bytes]) -> bytes:
    return b"".join(chunks)


def test_archive_is_a_tar_of_all_files_and_the_manifest(directory: Path) -> None:
    plan = plan_archive(directory)
    archive = joined(plan.read())
    assert len(archive) == plan.size
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
        contents = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert contents == {**CONTENT, MANIFEST_NAME: (directory / MANIFEST_NAME).read_bytes()}
    assert [member.name for member in members] == sorted(contents)
    assert {(member.mtime, member.uid, member.gid, member.mode) for member in members} == {
        (0, 0, 0, 0o644)
    }


@settings(deadline=None)
@given(data=st.data())
def test_any_range_is_a_slice_of_the_archive(directory: Path, data: st.DataObject) -> None:
    plan = plan_archive(directory)
    archive = joined(plan.read())
    start = data.draw(st.integers(0, plan.size))
    stop = data.draw(st.integers(start, plan.size))
    assert joined(plan.read(start, stop)) == archive[start:stop]


@settings(deadline=None)
@given(
    content=st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=8), st.binary(max_size=1500), max_size=5
    ),
    cut=st.floats(0, 1),
)
def test_archive_round_trip(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, bytes], cut: float
) -> None:
    plan = plan_archive(fill(tmp_path_factory.mktemp("any"), content))
    middle = int(plan.size * cut)
    halves = joined(plan.read(0, middle)) + joined(plan.read(middle))
    with tarfile.open(fileobj=io.BytesIO(halves)) as tar:
        contents = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    del contents[MANIFEST_NAME]
    assert contents == content


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5), (0, 10**9)])
def test_range_outside_the_archive_is_refused(directory: Path, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"the range {start} to {stop} is not within"):
        plan_archive(directory).read(start, stop)


def test_same_files_give_same_bytes_and_etag(directory: Path, tmp_path: Path) -> None:
    twin = plan_archive(fill(tmp_path / "twin", CONTENT))
    other = plan_archive(fill(tmp_path / "other", {**CONTENT, "exact": b"y" * 512}))
    plan = plan_archive(directory)
    assert joined(twin.read()) == joined(plan.read())
    assert twin.etag == plan.etag
    assert other.etag != plan.etag
    assert plan.etag.startswith('"tar-')
    assert plan.etag.endswith('"')


def test_large_files_are_read_in_chunks(tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES + 1
    home = fill(tmp_path / "large", {"large": b"z" * size})
    assert [len(chunk) for chunk in plan_file(home / "large").read()] == [
        CHUNK_BYTES,
        CHUNK_BYTES,
        1,
    ]


def test_etag_of_single_file_is_its_digest(directory: Path) -> None:
    plan = plan_file(directory / LONG_NAME)
    assert plan.size == 8
    assert joined(plan.read(4, 8)) == b"away"
    listed = (directory / MANIFEST_NAME).read_text()
    assert plan.etag.strip('"') in listed
    manifest = plan_file(directory / MANIFEST_NAME)
    assert joined(manifest.read()).decode() == listed


def test_unlisted_files_are_not_opened(tmp_path: Path) -> None:
    home = fill(tmp_path / "home", {"listed": b"1"})
    (home / "secret").write_bytes(b"2")
    (tmp_path / "outside").write_bytes(b"3")
    with pytest.raises(CheckpointError, match=r"'secret' is not in the manifest.json of 'home'"):
        plan_file(home / "secret")
    with pytest.raises(CheckpointError, match=r"no parent directory of 'outside' has a manifest"):
        plan_file(home / ".." / "outside")
    with pytest.raises(CheckpointError, match=r"no parent directory of 'outside' has a manifest"):
        plan_file(tmp_path / "outside")
    assert b"secret" not in joined(plan_archive(home).read())


def test_file_changed_before_reading_raises(tmp_path: Path) -> None:
    home = fill(tmp_path / "home", {"file": b"12345"})
    plan = plan_file(home / "file")
    (home / "file").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="'file' has 3 bytes, expected 5: it was changed"):
        joined(plan.read())
    (home / "file").unlink()
    with pytest.raises(CheckpointError, match="'file' cannot be read: No such file"):
        joined(plan.read())
    (home / "file").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="'file' cannot be read"):
        joined(plan.read())


def test_file_that_shrinks_during_reading_raises(tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES
    home = fill(tmp_path / "home", {"file": b"z" * size})
    chunks = plan_file(home / "file").read()
    next(chunks)
    with (home / "file").open("r+b") as file:
        file.truncate(CHUNK_BYTES)
    with pytest.raises(CheckpointError, match=f"'file' has {CHUNK_BYTES} bytes, expected {size}"):
        next(chunks)
