"""`checkpoint download` (P-32): whatever goes wrong, it is whole and checked or not there."""

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

from tests.integration.cli.checkpoint.download_sources import ADAPTER, WEIGHTS, contents, folder_of, link, manifest, names, offer_archive, offer_files, tar
from tests.integration.cli.conftest import Scene, Tinkex
from tests.integration.conftest import PATIENCE, Connect, eventually
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
    """A line that breaks is tried again at once."""
    monkeypatch.setattr(transfer, "_WAITS", RetryPolicy(first_wait_seconds=0.001))


def is_weights(call: Call) -> bool:
    return WEIGHTS in call.path


def is_large(call: Call) -> bool:
    return is_weights(call) or "archive.tar" in call.path


# --- what can go wrong -----------------------------------------------------------------------


def test_a_truncated_body_is_no_success_and_the_next_try_goes_on(
    scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    """Protocol 12.2: the official one takes 500 of 100,000 bytes for the whole."""
    server, words = scene.server, ("checkpoint", "download", external, "-o", str(place))
    server.inject("download", Fault(cut_after_bytes=5000), match=is_weights)
    server.inject("download", Fault(drop=True), times=None, match=is_weights)
    failed = tinkex(*words, "--json")
    assert failed.exit_code == 1
    assert "stopped at 5000 of" in failed.failure["message"]
    assert "goes on where it stopped" in failed.failure["hint"]
    folder = folder_of(place, external)
    assert names(place) == [f".{folder.name}.partial"]
    server.clear_faults()
    assert tinkex(*words).exit_code == 0
    assert [call.headers.get("range") for call in server.calls("download") if is_weights(call)][
        -1
    ] == "bytes=5000-"
    assert names(place) == [folder.name]


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_a_server_that_dies_in_the_middle_costs_only_the_rest(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    server, path = scene.server, external if kind == "files" else scene.training
    words = ("checkpoint", "download", path, "-o", str(place))

    def cut_and_die(call: Call) -> bool:
        threading.Thread(target=server.stop).start()
        return True

    # An archive is looked at once before it is fetched.
    cut = Fault(cut_after_bytes=5000)
    server.inject("download", cut, times=1 if kind == "files" else 2, match=is_large)
    # It goes on for a moment, then the server is not there any more.
    server.inject(
        "download", Fault(drop=True), match=lambda call: is_large(call) and cut_and_die(call)
    )
    server.inject("download", Fault(drop=True), times=None, match=is_large)
    failed = tinkex(*words)
    assert failed.exit_code == 1
    eventually(lambda: server._loopback is None)
    assert not folder_of(place, path).exists()
    server.clear_faults()
    server.start()
    assert tinkex(*words).exit_code == 0
    large = [call for call in server.calls("download") if is_large(call)]
    assert large[-1].headers.get("range") == "bytes=5000-"
    assert names(place) == [folder_of(place, path).name]


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_a_wrong_digest_is_refused(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    damaged = {**ADAPTER, WEIGHTS: ADAPTER[WEIGHTS][:-1] + b"x"}
    files = {**damaged, "manifest.json": manifest(ADAPTER)}
    if kind == "files":
        offer_files(scene.server, files)
        path = external
    else:
        offer_archive(scene.server, tar(files))
        path = scene.training
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
def test_an_archive_that_leads_out_of_its_folder_is_refused(
    member: dict[str, bytes | tarfile.TarInfo], scene: Scene, tinkex: Tinkex, place: Path
) -> None:
    offer_archive(scene.server, tar({**ADAPTER, **member}))
    failed = tinkex("checkpoint", "download", scene.training, "-o", str(place))
    assert failed.exit_code == 1
    assert "Refused" in failed.err
    assert names(place) == []
    assert not (place.parent / "outside").exists()


@pytest.mark.parametrize(
    "body", [b"no tar at all" * 99, b"", tar(ADAPTER)[:-12000], tar(ADAPTER, is_packed=True)[:-40]]
)
def test_a_damaged_archive_leaves_nothing(
    body: bytes, scene: Scene, tinkex: Tinkex, place: Path
) -> None:
    offer_archive(scene.server, body)
    failed = tinkex("checkpoint", "download", scene.training, "-o", str(place))
    assert isinstance(failed.error, DownloadError)
    assert names(place) == []


def test_a_file_that_leads_out_of_its_folder_is_refused(
    scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    offer_files(scene.server, {"../outside": b"x"})
    assert "unsafe file name" in tinkex("checkpoint", "download", external, "-o", str(place)).err
    assert names(place) == []


def test_a_full_disk_is_said_and_the_rest_comes_later(
    scene: Scene,
    external: str,
    tinkex: Tinkex,
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


def test_a_disk_that_is_full_when_unpacking_leaves_nothing(
    scene: Scene, tinkex: Tinkex, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = ("checkpoint", "download", scene.training, "-o", str(place))
    with monkeypatch.context() as patched:
        patched.setattr(disk._TarExtractor, "_unpack", no_room)
        failed = tinkex(*words)
    assert failed.exit_code == 1
    assert "No space left on device" in failed.err
    assert names(place) == []
    assert tinkex(*words).exit_code == 0


def test_a_place_that_cannot_be_written_is_said(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    (place / "file").write_text("in the way")
    failed = tinkex("checkpoint", "download", scene.training, "-o", str(place / "file"))
    assert failed.exit_code == 1
    assert "could not be put in place: Not a directory" in failed.err


# --- what is there already -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_what_is_there_stays_unless_it_is_replaced_whole(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    """P-32: the official one deletes the old folder before it asks for the new one."""
    path = external if kind == "files" else scene.training
    folder = folder_of(place, path)
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    words = ("checkpoint", "download", path, "-o", str(place))
    calls = len(scene.server.calls())
    refused = tinkex(*words, "--json")
    assert refused.exit_code == 1
    assert "exists already" in refused.failure["message"]
    assert "--force" in refused.failure["hint"]
    assert len(scene.server.calls()) == calls
    scene.server.inject("download", Fault(status=403), times=None)
    assert tinkex(*words, "--force").exit_code == 1
    assert contents(folder) == {"mine.txt": b"keep"}
    scene.server.clear_faults()
    assert tinkex(*words, "--force").exit_code == 0
    assert set(contents(folder)) == {"adapter_config.json", WEIGHTS}
    assert names(place) == [folder.name]


def test_a_link_is_not_replaced(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    (place.parent / "elsewhere").mkdir()
    folder_of(place, scene.training).symlink_to(place.parent / "elsewhere")
    failed = tinkex("checkpoint", "download", scene.training, "-o", str(place), "--force")
    assert failed.exit_code == 1
    assert "not a folder that can be replaced" in failed.err


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_of_two_downloads_to_one_place_one_is_refused(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    path = external if kind == "files" else scene.training
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


def interrupted(scene: Scene, path: str, place: Path, num_calls: int) -> str:
    """Press Ctrl-C when the server was asked for so many files; returns what was said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "checkpoint", "download", path, "-o", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    scene.server.wait_for("download", num_calls, timeout=PATIENCE)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_ctrl_c_leaves_parts_alone_and_the_next_try_goes_on(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    path = external if kind == "files" else scene.training
    server, sessions = scene.server, len(scene.server.sessions)

    cut = Fault(cut_after_bytes=5000)
    server.inject("download", cut, times=1 if kind == "files" else 2, match=is_large)
    server.inject("download", Fault(delay_seconds=60.0), match=is_large)
    told = interrupted(scene, path, place, num_calls=3)
    assert f"{INTERRUPTED_MESSAGE}\n{RESUME_HINT}\n" in told
    assert "Error" not in told
    folder = folder_of(place, path)
    assert names(place) == [f".{folder.name}.partial"]
    server.clear_faults()
    assert tinkex("checkpoint", "download", path, "-o", str(place)).exit_code == 0
    large = [call for call in server.calls("download") if is_large(call)]
    assert large[-1].headers.get("range") == "bytes=5000-"
    assert names(place) == [folder.name]
    assert len(server.sessions) == sessions


def test_ctrl_c_before_anything_arrived_leaves_nothing(scene: Scene, place: Path) -> None:
    scene.server.inject("download", Fault(delay_seconds=60.0), times=None)
    told = interrupted(scene, scene.training, place, num_calls=1)
    assert "goes on" not in told
    assert names(place) == []


def test_ctrl_c_while_an_export_comes_down_leaves_nothing_on_the_server(
    scene: Scene, place: Path
) -> None:
    scene.server.inject("checkpoint_archive", Fault(status=404), times=None)
    scene.server.inject("download", Fault(delay_seconds=60.0), times=None)
    before = set(scene.server.sessions)
    interrupted(scene, scene.training, place, num_calls=2)
    (session,) = set(scene.server.sessions) - before
    assert scene.server.finish_reasons[session] == "interrupted"
    assert len(scene.server.calls("delete_checkpoint")) == 1
    assert names(place) == []


def test_unpacking_stops_when_it_is_cancelled(
    scene: Scene, connect: Connect, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is waited for: nothing appears after the end."""
    started, may_go_on = threading.Event(), threading.Event()
    extract = checkpoint.extract_archive

    def slow(archive: Path, fresh: Path, **options: object) -> Path:
        started.set()
        assert may_go_on.wait(PATIENCE)
        return extract(archive, fresh, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "extract_archive", slow)
    rest = connect(scene.server).rest_client()
    work = rest.download_checkpoint(scene.training, place / "out")
    assert started.wait(PATIENCE)
    work.cancel()
    may_go_on.set()
    eventually(lambda: names(place) == [])
    assert not (place / "out").exists()
