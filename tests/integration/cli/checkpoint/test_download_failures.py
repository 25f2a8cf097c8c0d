"""`checkpoint download`: after any failure the folder is either complete or absent."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from tests.integration.cli.checkpoint.download_sources import (
    ADAPTER,
    WEIGHTS,
    contents,
    folder_of,
    link,
    manifest,
    names,
    offer_archive,
    offer_files,
    refuse_file_links,
    tar,
)
from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import TIMEOUT_SECONDS, Connect, eventually
from tinkex.cli.commands.checkpoint.download import INTERRUPTED_MESSAGE, RESUME_HINT
from tinkex.client.download import archive as disk
from tinkex.client.download import checkpoint, transfer
from tinkex.client.download.partial_file import PartialFile
from tinkex.client.retry import RetryPolicy
from tinkex.errors import DownloadError
from tinkex.testing import Fault
from tinkex.testing.calls import Call


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry broken connections without delay."""
    monkeypatch.setattr(transfer, "_BACKOFF_POLICY", RetryPolicy(first_wait_seconds=0.001))


def is_weights(call: Call) -> bool:
    return WEIGHTS in call.path


def is_large(call: Call) -> bool:
    return is_weights(call) or "/archives/" in call.path


# --- what can go wrong -----------------------------------------------------------------------


def test_truncated_body_fails_and_is_resumed(
    seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    """The official CLI accepts a truncated body."""
    server, words = seeded.server, ("checkpoint", "download", external, "-o", str(place))
    server.inject("download", Fault(cut_after_bytes=5000), match=is_weights)
    server.inject("download", Fault(drop=True), times=None, match=is_weights)
    failed = tinkex(*words, "--json")
    assert failed.exit_code == 1
    assert "stopped at 5000 of" in failed.failure["message"]
    assert "resumes where it stopped" in failed.failure["hint"]
    folder = folder_of(place, external)
    assert names(place) == [f".{folder.name}.partial"]
    server.clear_faults()
    assert tinkex(*words).exit_code == 0
    assert [call.headers.get("range") for call in server.calls("download") if is_weights(call)][
        -1
    ] == "bytes=5000-"
    assert names(place) == [folder.name]


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_download_resumes_after_server_crash(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    server, path = seeded.server, external if kind == "files" else seeded.training
    refuse_file_links(server)
    words = ("checkpoint", "download", path, "-o", str(place))

    def cut_and_die(call: Call) -> bool:
        threading.Thread(target=server.stop).start()
        return True

    # An archive is requested once before the actual download.
    cut = Fault(cut_after_bytes=5000)
    server.inject("download", cut, times=1 if kind == "files" else 2, match=is_large)
    # The download resumes for a moment, then the server stops.
    server.inject(
        "download", Fault(drop=True), match=lambda call: is_large(call) and cut_and_die(call)
    )
    server.inject("download", Fault(drop=True), times=None, match=is_large)
    failed = tinkex(*words)
    assert failed.exit_code == 1
    eventually(lambda: server._running is None)
    assert not folder_of(place, path).exists()
    server.clear_faults()
    refuse_file_links(server)
    server.start()
    assert tinkex(*words).exit_code == 0
    large = [call for call in server.calls("download") if is_large(call)]
    assert large[-1].headers.get("range") == "bytes=5000-"
    assert names(place) == [folder_of(place, path).name]


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_wrong_digest_is_rejected(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    damaged = {**ADAPTER, WEIGHTS: ADAPTER[WEIGHTS][:-1] + b"x"}
    files = {**damaged, "manifest.json": manifest(ADAPTER)}
    if kind == "files":
        offer_files(seeded.server, files)
        path = external
    else:
        offer_archive(seeded.server, tar(files))
        path = seeded.training
    failed = tinkex("checkpoint", "download", path, "-o", str(place), "--json")
    assert (failed.exit_code, failed.failure["type"]) == (1, "DownloadError")
    assert "sha256" in failed.failure["message"]
    assert not folder_of(place, path).exists()


@pytest.mark.parametrize(
    "member",
    [
        {"../outside": b"x"},
        {"/tmp/outside": b"x"},
        {"a/../../outside": b"x"},
        {"outside": link("outside", "/etc/passwd")},
        {"outside": link("outside", "/etc/passwd", tarfile.LNKTYPE)},
    ],
    ids=["dots", "absolute", "hidden dots", "symlink", "hard link"],
)
def test_archive_with_path_traversal_is_rejected(
    member: dict[str, bytes | tarfile.TarInfo], seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    offer_archive(seeded.server, tar({**ADAPTER, **member}))
    failed = tinkex("checkpoint", "download", seeded.training, "-o", str(place))
    assert failed.exit_code == 1
    assert "Refused" in failed.err
    assert names(place) == []
    assert not (place.parent / "outside").exists()


@pytest.mark.parametrize(
    "body", [b"no tar at all" * 99, b"", tar(ADAPTER)[:-12000], tar(ADAPTER, is_packed=True)[:-40]]
)
def test_damaged_archive_leaves_no_files(
    body: bytes, seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    offer_archive(seeded.server, body)
    failed = tinkex("checkpoint", "download", seeded.training, "-o", str(place))
    assert isinstance(failed.error, DownloadError)
    assert names(place) == []


def test_file_with_path_traversal_is_rejected(
    seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    offer_files(seeded.server, {"../outside": b"x"})
    assert "unsafe file name" in tinkex("checkpoint", "download", external, "-o", str(place)).err
    assert names(place) == []


def test_full_disk_is_reported_and_download_resumes(
    seeded: SeededServer,
    external: str,
    tinkex: RunCli,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(part: PartialFile, block: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = ("checkpoint", "download", external, "-o", str(place))
    with monkeypatch.context() as patched:
        patched.setattr(PartialFile, "append", no_room)
        failed = tinkex(*words)
    assert failed.exit_code == 1
    assert "the disk is full" in failed.err
    assert names(place) == []
    assert tinkex(*words).exit_code == 0


def test_full_disk_while_unpacking_leaves_no_files(
    seeded: SeededServer, tinkex: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refuse_file_links(seeded.server)
    words = ("checkpoint", "download", seeded.training, "-o", str(place))
    with monkeypatch.context() as patched:
        patched.setattr(disk._TarExtractor, "_extract", no_room)
        failed = tinkex(*words)
    assert failed.exit_code == 1
    assert "No space left on device" in failed.err
    assert names(place) == []
    assert tinkex(*words).exit_code == 0


def test_unwritable_destination_is_an_error(
    seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    (place / "file").write_text("in the way")
    failed = tinkex("checkpoint", "download", seeded.training, "-o", str(place / "file"))
    assert failed.exit_code == 1
    assert "Cannot write" in failed.err
    assert "Not a directory" in failed.err


# --- what is there already -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_existing_folder_is_replaced_atomically(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    """The official CLI deletes the old folder before the download."""
    path = external if kind == "files" else seeded.training
    refuse_file_links(seeded.server)
    folder = folder_of(place, path)
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    words = ("checkpoint", "download", path, "-o", str(place))
    calls = len(seeded.server.calls())
    refused = tinkex(*words, "--json")
    assert refused.exit_code == 1
    assert "already exists" in refused.failure["message"]
    assert "--force" in refused.failure["hint"]
    assert len(seeded.server.calls()) == calls
    seeded.server.inject("download", Fault(status=403), times=None)
    assert tinkex(*words, "--force").exit_code == 1
    assert contents(folder) == {"mine.txt": b"keep"}
    seeded.server.clear_faults()
    refuse_file_links(seeded.server)
    assert tinkex(*words, "--force").exit_code == 0
    assert {"adapter_config.json", WEIGHTS} <= set(contents(folder))
    assert "mine.txt" not in contents(folder)
    assert names(place) == [folder.name]


def test_symlink_is_not_replaced(seeded: SeededServer, tinkex: RunCli, place: Path) -> None:
    (place.parent / "elsewhere").mkdir()
    folder_of(place, seeded.training).symlink_to(place.parent / "elsewhere")
    failed = tinkex("checkpoint", "download", seeded.training, "-o", str(place), "--force")
    assert failed.exit_code == 1
    assert "not a directory that can be replaced" in failed.err


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_concurrent_download_to_same_place_is_rejected(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    path = external if kind == "files" else seeded.training
    refuse_file_links(seeded.server)
    staging = place / f".{folder_of(place, path).name}.partial"
    staging.mkdir()
    words = ("checkpoint", "download", path, "-o", str(place))
    with disk.exclusive_lock(staging):
        refused = tinkex(*words)
    assert refused.exit_code == 1
    assert "Another download is writing" in refused.err
    assert not folder_of(place, path).exists()
    assert tinkex(*words).exit_code == 0
    assert names(place) == [folder_of(place, path).name]


# --- Ctrl-C ----------------------------------------------------------------------------------


def interrupted(seeded: SeededServer, path: str, place: Path, num_large: int = 0) -> str:
    """Press Ctrl-C after a file request and `num_large` large ones, and return the output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "checkpoint", "download", path, "-o", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    seeded.server.wait_for("download", timeout=TIMEOUT_SECONDS)
    eventually(lambda: sum(map(is_large, seeded.server.calls("download"))) >= num_large)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_ctrl_c_keeps_partial_files_and_download_resumes(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    path = external if kind == "files" else seeded.training
    server, sessions = seeded.server, len(seeded.server.sessions)
    refuse_file_links(server)
    cut, num_cuts = Fault(cut_after_bytes=5000), 1 if kind == "files" else 2
    server.inject("download", cut, times=num_cuts, match=is_large)
    server.inject("download", Fault(delay_seconds=60.0), match=is_large)
    output = interrupted(seeded, path, place, num_large=num_cuts + 1)
    assert f"{INTERRUPTED_MESSAGE}\n{RESUME_HINT}\n" in output
    assert "Error" not in output
    folder = folder_of(place, path)
    assert names(place) == [f".{folder.name}.partial"]
    server.clear_faults()
    refuse_file_links(server)
    assert tinkex("checkpoint", "download", path, "-o", str(place)).exit_code == 0
    large = [call for call in server.calls("download") if is_large(call)]
    assert large[-1].headers.get("range") == "bytes=5000-"
    assert names(place) == [folder.name]
    assert len(server.sessions) == sessions


def test_ctrl_c_before_first_byte_leaves_no_files(seeded: SeededServer, place: Path) -> None:
    refuse_file_links(seeded.server)
    seeded.server.inject("download", Fault(delay_seconds=60.0), times=None)
    output = interrupted(seeded, seeded.training, place)
    assert RESUME_HINT not in output
    assert names(place) == []


def test_ctrl_c_during_export_download_deletes_export(seeded: SeededServer, place: Path) -> None:
    refuse_file_links(seeded.server)
    seeded.server.inject("checkpoint_archive", Fault(status=404), times=None)
    seeded.server.inject("download", Fault(delay_seconds=60.0), times=None)
    before = set(seeded.server.sessions)
    interrupted(seeded, seeded.training, place)
    (session,) = set(seeded.server.sessions) - before
    assert seeded.server.finish_reasons[session] == "interrupted"
    assert len(seeded.server.calls("delete_checkpoint")) == 1
    assert names(place) == []


def test_unpacking_stops_when_it_is_cancelled(
    seeded: SeededServer, connect: Connect, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is joined, so no files appear afterwards."""
    started, may_continue = threading.Event(), threading.Event()
    extract = checkpoint.extract_archive

    def slow(archive: Path, fresh: Path, **options: object) -> Path:
        started.set()
        assert may_continue.wait(TIMEOUT_SECONDS)
        return extract(archive, fresh, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "extract_archive", slow)
    refuse_file_links(seeded.server)
    rest = connect(seeded.server).rest_client()
    work = rest.download_checkpoint(seeded.training, place / "out")
    assert started.wait(TIMEOUT_SECONDS)
    work.cancel()
    may_continue.set()
    eventually(lambda: names(place) == [])
    assert not (place / "out").exists()
