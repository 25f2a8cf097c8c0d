"""`checkpoint download` (S3-15, S3-G03, P-32): every kind of checkpoint from every server."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pyrage
import pytest

from tests.integration.cli.checkpoint.download_sources import ADAPTER, WEIGHTS, contents, folder_of, manifest, names, offer_archive, tar
from tests.integration.cli.conftest import Scene, Tinkex
from tests.integration.cli.test_official_shapes import OFFICIAL, official
from tinkex.cli.context import Context, Screen
from tinkex.cli.format import format_size
from tinkex.cli.output.checkpoints import FileTotals
from tinkex.testing import Fault

# --- the good case ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["training", "sampler", "external"])
def test_every_kind_of_checkpoint_comes_down(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    path = {"training": scene.training, "sampler": scene.sampler, "external": external}[kind]
    sessions = len(scene.server.sessions)
    found = tinkex("checkpoint", "download", path, "-o", str(place), "--json").json
    folder = folder_of(place, path)
    files = contents(folder)
    assert found == {
        "checkpoint_path": path,
        "destination": str(folder),
        "file_size_bytes": sum(map(len, files.values())),
        "num_files": 2,
    }
    assert set(files) == {"adapter_config.json", WEIGHTS}
    assert names(place) == [folder.name]
    assert len(scene.server.sessions) == sessions


def test_a_person_reads_where_it_went(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    done = tinkex("checkpoint", "download", scene.training, "--output", str(place))
    assert (done.exit_code, done.err) == (0, "")
    assert f"Checkpoint Download: {scene.training}" in done.out
    assert str(folder_of(place, scene.training)) in done.out
    assert format_size(FileTotals.measure(folder_of(place, scene.training)).num_bytes) in done.out


def test_without_output_it_goes_here(
    scene: Scene, tinkex: Tinkex, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    done = tinkex("checkpoint", "download", scene.sampler, "--json").json
    assert names(place) == [done["destination"]]


def test_folders_above_are_made(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    assert tinkex("checkpoint", "download", scene.training, "-o", f"{place}/a/b").exit_code == 0
    assert folder_of(place / "a" / "b", scene.training).is_dir()


def test_the_archive_can_be_kept_as_it_is(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    words = ("checkpoint", "download", scene.training, "-o", str(place), "--no-extract")
    found = tinkex(*words, "--json").json
    file = Path(found["destination"])
    assert names(place) == [file.name]
    assert file.name == f"{folder_of(place, scene.training).name}.tar"
    assert found["file_size_bytes"] == file.stat().st_size
    with tarfile.open(file) as archive:
        assert set(archive.getnames()) == {"adapter_config.json", WEIGHTS}
    assert tinkex(*words).exit_code == 1
    assert tinkex(*words, "--force").exit_code == 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_archives_are_unpacked_and_removed(
    is_packed: bool, scene: Scene, tinkex: Tinkex, place: Path
) -> None:
    files = {**ADAPTER, "below/more.txt": b"more"}
    listed = {**files, "manifest.json": manifest(files)}
    offer_archive(scene.server, tar(listed, is_packed=is_packed))
    found = tinkex("checkpoint", "download", scene.training, "-o", str(place), "--json").json
    assert contents(folder_of(place, scene.training)) == listed
    assert found["num_files"] == 4
    assert names(place) == [folder_of(place, scene.training).name]


def test_bars_show_bytes_then_files(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    screen = Screen(is_terminal=True, width=120)
    context = Context(stdout=Screen(width=120), stderr=screen)
    done = tinkex("checkpoint", "download", scene.training, "-o", str(place), context=context)
    assert done.exit_code == 0
    shown = done.err
    assert shown.index("Downloading") < shown.index("Unpacking")
    assert "2/2" in shown
    quiet = tinkex("checkpoint", "download", scene.sampler, "-o", str(place))
    assert quiet.err == ""


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official command line is not installed")
@pytest.mark.parametrize("kind", ["training", "external"])
def test_the_official_command_says_and_fetches_the_same(
    kind: str, scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    path = scene.training if kind == "training" else external
    theirs = official("checkpoint", "download", path, "-o", str(place / "theirs"))
    ours = tinkex("checkpoint", "download", path, "-o", str(place / "ours"), "--json").json
    assert ours.pop("num_files") == 2
    destination = Path(ours.pop("destination"))
    # A colon is not allowed in names on every file system.
    assert destination.name == Path(theirs["destination"]).name.replace(":", "_")
    assert contents(destination) == contents(Path(theirs.pop("destination")))
    assert ours == theirs


# --- links that end, servers that export -----------------------------------------------------


def test_links_are_signed_anew_before_they_end(
    scene: Scene, external: str, tinkex: Tinkex, place: Path
) -> None:
    stale = {"adapter_config.json": "http://127.0.0.1:9/x", WEIGHTS: "http://127.0.0.1:9/y"}
    answer = {"urls": stale, "expires": "2020-01-01T00:00:00Z"}
    scene.server.inject("external_weights_urls", Fault(status=200, body=answer))
    assert tinkex("checkpoint", "download", external, "-o", str(place)).exit_code == 0
    assert len(scene.server.calls("external_weights_urls")) == 2


def test_a_server_without_archives_exports_and_forgets(
    scene: Scene, tinkex: Tinkex, place: Path
) -> None:
    """The official server's way with training checkpoints (protocol 9)."""
    scene.server.inject("checkpoint_archive", Fault(status=404), times=None)
    before = set(scene.server.sessions)
    done = tinkex("checkpoint", "download", scene.training, "-o", str(place), "--json")
    assert done.json["checkpoint_path"] == scene.training
    assert WEIGHTS in contents(folder_of(place, scene.training))
    (session,) = set(scene.server.sessions) - before
    assert scene.server.finish_reasons[session] == "success"
    (saved,) = scene.server.calls("save_weights_external")
    assert b"ttl_seconds" in saved.body
    assert len(scene.server.calls("delete_checkpoint")) == 1


def test_the_copy_is_deleted_even_if_its_download_fails(
    scene: Scene, tinkex: Tinkex, place: Path
) -> None:
    scene.server.inject("checkpoint_archive", Fault(status=404), times=None)
    scene.server.inject("download", Fault(status=403), times=None)
    failed = tinkex("checkpoint", "download", scene.training, "-o", str(place))
    assert failed.exit_code == 1
    assert len(scene.server.calls("delete_checkpoint")) == 1
    assert "errored" in scene.server.finish_reasons.values()
    assert names(place) == []


def test_no_session_is_opened_for_what_does_not_exist(
    scene: Scene, tinkex: Tinkex, place: Path
) -> None:
    sessions = len(scene.server.sessions)
    path = f"tinker://{scene.run_ids[0]}/weights/nosuch"
    failed = tinkex("checkpoint", "download", path, "-o", str(place))
    assert failed.exit_code == 1
    assert failed.err.startswith("Error: Resource not found: ")
    assert len(scene.server.sessions) == sessions
    assert names(place) == []


@pytest.mark.parametrize("path", ["weights/0001", "tinker://run", "tinker://run/other/x"])
def test_a_path_that_is_none_is_refused_without_a_server(path: str, tinkex: Tinkex) -> None:
    assert "Invalid tinker path" in tinkex("checkpoint", "download", path).err


def test_an_identity_decrypts_an_archive(scene: Scene, tinkex: Tinkex, place: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    listed = ADAPTER | {"manifest.json": manifest(ADAPTER)}
    key_file = place / "key.txt"
    key_file.write_text(str(identity))
    locked = {
        f"{name}.age": pyrage.encrypt(data, [identity.to_public()]) for name, data in listed.items()
    }
    offer_archive(scene.server, tar(locked))
    words = ("checkpoint", "download", scene.training, "-o", str(place), "--identity")
    assert tinkex(*words, str(key_file)).exit_code == 0
    assert contents(folder_of(place, scene.training)) == listed
    key_file.write_text("not a key")
    refused = tinkex(*words, str(key_file), "--force")
    assert refused.exit_code == 1
    assert "is neither an age identity file nor an SSH private key" in refused.err
    assert contents(folder_of(place, scene.training)) == listed
