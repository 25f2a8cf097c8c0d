"""Archive extraction: atomic, and never outside its directory."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard

from tinkex.client.download import archive as archive_module
from tinkex.client.download.archive import (
    exclusive_lock,
    extract_archive,
    safe_relative_path,
)
from tinkex.errors import DownloadError, InvalidInput
from tinkex.system.atomic import publish_directory, recover_directory

FILES = {
    "adapter_config.json": b"{}",
    "weights/model.bin": bytes(range(256)) * 9000,
    "empty": b"",
}


class Disk(NamedTuple):
    """The part of `shutil.disk_usage` that is used."""

    total: int
    free: int


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def make_tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def plain_tar() -> bytes:
    return make_tar(*(member(name, data) for name, data in FILES.items()))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def unpack(tmp_path: Path, data: bytes, **options: Any) -> Path:
    archive = tmp_path / "checkpoint.tar"
    archive.write_bytes(data)
    return extract_archive(archive, tmp_path / "out", **options)


def assert_rejected(tmp_path: Path, data: bytes, problem: str, **options: Any) -> DownloadError:
    with pytest.raises(DownloadError, match=problem) as caught:
        unpack(tmp_path, data, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.tar"]
    return caught.value


def same(data: bytes) -> bytes:
    return data


def zstd_frames(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor(write_checksum=True)
    return packer.compress(data[:700]) + packer.compress(data[700:])


@pytest.mark.parametrize("pack", [same, gzip.compress, zstandard.compress, zstd_frames])
def test_extract_archive(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    seen: list[tuple[int, int | None]] = []
    data = pack(plain_tar())
    out = unpack(tmp_path, data, progress=lambda done, total: seen.append((done, total)))
    assert out == tmp_path / "out"
    assert contents(out) == FILES
    assert seen[-1] == (len(data), len(data))
    assert seen == sorted(seen)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.tar", "out"}


def test_extracted_files_are_counted(tmp_path: Path) -> None:
    counts: list[int] = []
    unpack(tmp_path, plain_tar(), on_files=counts.append)
    assert counts == sorted(counts)
    assert set(counts) <= set(range(1, len(FILES) + 1))
    assert counts[-1] == len(FILES)


def test_directories_and_leading_dot(tmp_path: Path) -> None:
    folder = {"type": tarfile.DIRTYPE}
    data = make_tar(
        member("./", **folder),
        member("./a/b.txt", b"x"),
        member("./a", **folder),
        member("./empty/deep", **folder),
    )
    out = unpack(tmp_path, data)
    assert contents(out) == {"a/b.txt": b"x"}
    assert (out / "empty" / "deep").is_dir()


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../up", "a/../../up", "..", "C:/x", "c:x", "a\\..\\b", "a\nb", "//x", "a\x7f"],
)
def test_unsafe_names_are_rejected(tmp_path: Path, name: str) -> None:
    data = make_tar(member("fine", b"x"), member(name, b"x"))
    error = assert_rejected(tmp_path, data, "unsafe file name")
    assert repr(name) in error.message


@pytest.mark.parametrize("name", ["", ".", "./", "a\0b", "/", "a/..", "..\\x"])
def test_unsafe_paths_are_rejected(name: str) -> None:
    with pytest.raises(DownloadError, match="unsafe"):
        safe_relative_path(name)


@pytest.mark.parametrize(("name", "path"), [("a", "a"), ("a/b..c", "a/b..c"), ("./a//b", "a/b")])
def test_safe_paths_are_accepted(name: str, path: str) -> None:
    assert str(safe_relative_path(name)) == path


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CONTTYPE,
        b"Z",
    ],
)
def test_special_files_are_rejected(tmp_path: Path, kind: bytes) -> None:
    data = make_tar(member("fine", b"x"), member("odd", type=kind, linkname="fine"))
    assert_rejected(tmp_path, data, "'odd': it is neither a file nor a directory")


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    data = make_tar(
        member("link", type=tarfile.SYMTYPE, linkname=str(outside)), member("link/x", b"bad")
    )
    with pytest.raises(DownloadError, match="'link'"):
        unpack(tmp_path, data)
    assert not list(outside.iterdir())


def test_sparse_files_are_rejected(tmp_path: Path) -> None:
    info, data = member("sparse", b"0" * 512)
    info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999"}
    assert_rejected(tmp_path, make_tar((info, data)), "neither a file nor a directory")


@pytest.mark.parametrize("again", ["a/b", "./a/b", "a//b"])
def test_duplicate_name_is_rejected(tmp_path: Path, again: str) -> None:
    data = make_tar(member("a/b", b"x"), member(again, b"y"))
    assert_rejected(tmp_path, data, "the name occurs twice")


def test_file_used_as_directory_is_rejected(tmp_path: Path) -> None:
    assert_rejected(tmp_path, make_tar(member("a", b"x"), member("a/b", b"y")), "Cannot unpack")


def test_oversized_archive_is_rejected_before_writing(tmp_path: Path) -> None:
    data = gzip.compress(make_tar(member("zeros", bytes(5_000_000))))
    assert len(data) < 10_000
    assert_rejected(tmp_path, data, "more than 1000000 bytes", max_bytes=1_000_000)
    assert unpack(tmp_path, data, max_bytes=5_000_000).is_dir()


def test_oversized_header_is_rejected(tmp_path: Path) -> None:
    info, data = member("x", b"x")
    info.pax_headers = {"comment": "c" * 20_000_000}
    packed = gzip.compress(make_tar((info, data)), compresslevel=1)
    assert_rejected(tmp_path, packed, "too many bytes between two files")


def test_oversized_trailer_is_rejected(tmp_path: Path) -> None:
    packed = gzip.compress(plain_tar() + bytes(40_000_000), compresslevel=1)
    assert_rejected(tmp_path, packed, "too many bytes between two files")


def test_member_larger_than_free_space_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(total=10**9, free=1_000_000)
    monkeypatch.setattr(archive_module.shutil, "disk_usage", lambda _: disk)
    assert_rejected(tmp_path, plain_tar(), r"weights/model\.bin needs 2\.3 MB of disk space")


def test_too_many_members_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MAX_MEMBERS", 2)
    assert_rejected(tmp_path, plain_tar(), "or 2 files")


@pytest.mark.parametrize("pack", [same, gzip.compress, zstandard.compress])
def test_truncated_tar_is_damaged(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    whole = plain_tar()
    end_of_last_file = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for cut in (0, 100, 512, 1024, 1500, len(whole) // 2, end_of_last_file):
        assert_rejected(tmp_path, pack(whole[:cut]), "is damaged or not a tar archive")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_truncated_compression_is_damaged(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(plain_tar())
    for cut in (20, len(packed) // 2):
        assert_rejected(tmp_path, packed[:cut], "is damaged or not a tar archive")


def test_wrong_checksum_is_damaged(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(plain_tar()))
    packed[-8] ^= 1
    assert_rejected(tmp_path, bytes(packed), "is damaged.*CRC")


def test_garbage_between_files_is_damaged(tmp_path: Path) -> None:
    data = bytearray(make_tar(member("a", b"x"), member("b", b"y")))
    data[1024 + 150] ^= 1
    assert_rejected(tmp_path, bytes(data), "bad checksum instead of a file header")


@pytest.mark.parametrize("data", [b"", b"hello", b"<html>" * 1000, bytes(10240)])
def test_non_archive_is_rejected(tmp_path: Path, data: bytes) -> None:
    assert_rejected(tmp_path, data, "not a tar archive|contains no files")


def test_missing_archive_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"Cannot unpack gone\.tar: No such file"):
        extract_archive(tmp_path / "gone.tar", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_existing_destination_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidInput, match="exists already"):
        unpack(tmp_path, plain_tar())
    assert not list((tmp_path / "out").iterdir())


def test_interrupted_extraction_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_done: int, _total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(tmp_path, plain_tar(), progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.tar"]


def make_folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_directory_is_replaced_atomically(tmp_path: Path) -> None:
    new, out = make_folder(tmp_path / "new", "new"), make_folder(tmp_path / "out", "old")
    with pytest.raises(OSError, match="not empty"):
        publish_directory(new, out)
    assert (out / "file").read_text() == "old"
    publish_directory(new, out, replace=True)
    assert (out / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_replacement_restores_old_directory(tmp_path: Path) -> None:
    out = make_folder(tmp_path / "out", "old")
    with pytest.raises(OSError, match="No such file"):
        publish_directory(tmp_path / "gone", out, replace=True)
    assert (out / "file").read_text() == "old"


def test_interrupted_replacement_is_recovered(tmp_path: Path) -> None:
    out, aside = tmp_path / "out", make_folder(tmp_path / ".out.replaced", "old")
    recover_directory(out)
    assert (out / "file").read_text() == "old"
    make_folder(aside, "older")
    recover_directory(out)
    assert (out / "file").read_text() == "old"
    assert not aside.exists()
    recover_directory(out)


def test_exclusive_lock_is_exclusive(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path):
        with pytest.raises(DownloadError, match="Another download"), exclusive_lock(tmp_path):
            pass
        with pytest.raises(FileNotFoundError), exclusive_lock(tmp_path / "gone"):
            pass
    with exclusive_lock(tmp_path):
        pass
