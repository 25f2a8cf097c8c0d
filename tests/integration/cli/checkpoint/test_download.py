"""`checkpoint download` of every checkpoint type from every kind of server."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pyrage
import pytest

from tests.integration.cli.checkpoint.download_sources import (
    ADAPTER,
    WEIGHTS,
    contents,
    folder_of,
    manifest,
    names,
    offer_archive,
    refuse_file_links,
    tar,
)
from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.cli.test_official_shapes import OFFICIAL, official
from tinkex.cli.context import Context, Screen
from tinkex.cli.format import format_size
from tinkex.cli.output.checkpoints import FileTotals
from tinkex.testing import Fault

SAMPLER_FILES = {"adapter_config.json", WEIGHTS, "manifest.json", "tinkex.json"}
TRAINING_FILES = SAMPLER_FILES | {"optimizer.safetensors", "trainer_state.json"}


# --- the good case ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["training", "sampler", "external"])
def test_every_checkpoint_type_is_downloaded(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    path = {"training": seeded.training, "sampler": seeded.sampler, "external": external}[kind]
    sessions = len(seeded.server.sessions)
    found = tinkex("checkpoint", "download", path, "-o", str(place), "--json").json
    folder = folder_of(place, path)
    files = contents(folder)
    assert found == {
        "checkpoint_path": path,
        "destination": str(folder),
        "file_size_bytes": sum(map(len, files.values())),
        "num_files": len(files),
    }
    assert set(files) == (TRAINING_FILES if kind == "training" else SAMPLER_FILES)
    assert names(place) == [folder.name]
    assert len(seeded.server.sessions) == sessions


def test_table_shows_destination(seeded: SeededServer, tinkex: RunCli, place: Path) -> None:
    result = tinkex("checkpoint", "download", seeded.training, "--output", str(place))
    assert (result.exit_code, result.err) == (0, "")
    assert f"Checkpoint Download: {seeded.training}" in result.out
    assert str(folder_of(place, seeded.training)) in result.out
    assert (
        format_size(FileTotals.measure(folder_of(place, seeded.training)).num_bytes) in result.out
    )


def test_default_output_is_current_directory(
    seeded: SeededServer, tinkex: RunCli, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    result = tinkex("checkpoint", "download", seeded.sampler, "--json").json
    assert names(place) == [result["destination"]]


def test_parent_directories_are_created(seeded: SeededServer, tinkex: RunCli, place: Path) -> None:
    assert tinkex("checkpoint", "download", seeded.training, "-o", f"{place}/a/b").exit_code == 0
    assert folder_of(place / "a" / "b", seeded.training).is_dir()


def test_no_extract_keeps_archive(seeded: SeededServer, tinkex: RunCli, place: Path) -> None:
    words = ("checkpoint", "download", seeded.training, "-o", str(place), "--no-extract")
    found = tinkex(*words, "--json").json
    file = Path(found["destination"])
    assert names(place) == [file.name]
    assert file.name == f"{folder_of(place, seeded.training).name}.tar"
    assert found["file_size_bytes"] == file.stat().st_size
    with tarfile.open(file) as archive:
        assert set(archive.getnames()) == TRAINING_FILES
    assert tinkex(*words).exit_code == 1
    assert tinkex(*words, "--force").exit_code == 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_archives_are_unpacked_and_removed(
    is_packed: bool, seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    files = {**ADAPTER, "below/more.txt": b"more"}
    listed = {**files, "manifest.json": manifest(files)}
    offer_archive(seeded.server, tar(listed, is_packed=is_packed))
    found = tinkex("checkpoint", "download", seeded.training, "-o", str(place), "--json").json
    assert contents(folder_of(place, seeded.training)) == listed
    assert found["num_files"] == 4
    assert names(place) == [folder_of(place, seeded.training).name]


def test_bars_show_bytes_then_files(seeded: SeededServer, tinkex: RunCli, place: Path) -> None:
    refuse_file_links(seeded.server)
    screen = Screen(is_terminal=True, width=120)
    context = Context(stdout=Screen(width=120), stderr=screen)
    result = tinkex("checkpoint", "download", seeded.training, "-o", str(place), context=context)
    assert result.exit_code == 0
    shown = result.err
    assert shown.index("Downloading") < shown.index("Unpacking")
    assert "6/6" in shown
    quiet = tinkex("checkpoint", "download", seeded.sampler, "-o", str(place))
    assert quiet.err == ""


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official command line is not installed")
@pytest.mark.parametrize("kind", ["training", "external"])
def test_download_matches_official_cli(
    kind: str, seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    path = seeded.training if kind == "training" else external
    theirs = official("checkpoint", "download", path, "-o", str(place / "theirs"))
    ours = tinkex("checkpoint", "download", path, "-o", str(place / "ours"), "--json").json
    destination, their_destination = (Path(each.pop("destination")) for each in (ours, theirs))
    # Some file systems do not allow colons in names.
    assert destination.name == their_destination.name.replace(":", "_")
    our_files, their_files = contents(destination), contents(their_destination)
    assert ours.pop("num_files") == len(our_files)
    if kind == "training":
        # The official CLI exports weights first; the export has no optimizer state.
        extra = {"manifest.json", "optimizer.safetensors", "trainer_state.json"}
        assert theirs.pop("file_size_bytes") < ours.pop("file_size_bytes")
        assert set(our_files) - set(their_files) == extra - {"manifest.json"}
        our_files, their_files = (
            {name: content for name, content in files.items() if name not in extra}
            for files in (our_files, their_files)
        )
    assert our_files == their_files
    assert ours == theirs


# --- links that end, servers that export -----------------------------------------------------


def test_signed_urls_are_renewed_before_expiry(
    seeded: SeededServer, external: str, tinkex: RunCli, place: Path
) -> None:
    stale = {"adapter_config.json": "http://127.0.0.1:9/x", WEIGHTS: "http://127.0.0.1:9/y"}
    answer = {"urls": stale, "expires": "2020-01-01T00:00:00Z"}
    seeded.server.inject("external_weights_urls", Fault(status=200, body=answer))
    assert tinkex("checkpoint", "download", external, "-o", str(place)).exit_code == 0
    assert len(seeded.server.calls("external_weights_urls")) == 2


def test_export_is_used_without_archives_and_deleted(
    seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    """Training checkpoints on the official server must be exported first."""
    refuse_file_links(seeded.server)
    seeded.server.inject("checkpoint_archive", Fault(status=404), times=None)
    before = set(seeded.server.sessions)
    result = tinkex("checkpoint", "download", seeded.training, "-o", str(place), "--json")
    assert result.json["checkpoint_path"] == seeded.training
    assert WEIGHTS in contents(folder_of(place, seeded.training))
    (session,) = set(seeded.server.sessions) - before
    assert seeded.server.finish_reasons[session] == "success"
    (saved,) = seeded.server.calls("save_weights_external")
    assert b"ttl_seconds" in saved.body
    assert len(seeded.server.calls("delete_checkpoint")) == 1


def test_export_is_deleted_after_failed_download(
    seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    refuse_file_links(seeded.server)
    seeded.server.inject("checkpoint_archive", Fault(status=404), times=None)
    seeded.server.inject("download", Fault(status=403), times=None)
    failed = tinkex("checkpoint", "download", seeded.training, "-o", str(place))
    assert failed.exit_code == 1
    assert len(seeded.server.calls("delete_checkpoint")) == 1
    assert "errored" in seeded.server.finish_reasons.values()
    assert names(place) == []


def test_unknown_checkpoint_opens_no_session(
    seeded: SeededServer, tinkex: RunCli, place: Path
) -> None:
    sessions = len(seeded.server.sessions)
    path = f"tinker://{seeded.run_ids[0]}/weights/nosuch"
    failed = tinkex("checkpoint", "download", path, "-o", str(place))
    assert failed.exit_code == 1
    assert failed.err.startswith("Error: Resource not found: ")
    assert len(seeded.server.sessions) == sessions
    assert names(place) == []


@pytest.mark.parametrize("path", ["weights/0001", "tinker://run", "tinker://run/other/x"])
def test_invalid_path_sends_no_request(path: str, tinkex: RunCli) -> None:
    assert "Invalid tinker path" in tinkex("checkpoint", "download", path).err


def test_an_identity_decrypts_an_archive(seeded: SeededServer, tinkex: RunCli, place: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    listed = ADAPTER | {"manifest.json": manifest(ADAPTER)}
    key_file = place / "key.txt"
    key_file.write_text(str(identity))
    locked = {
        f"{name}.age": pyrage.encrypt(data, [identity.to_public()]) for name, data in listed.items()
    }
    offer_archive(seeded.server, tar(locked))
    words = ("checkpoint", "download", seeded.training, "-o", str(place), "--identity")
    assert tinkex(*words, str(key_file)).exit_code == 0
    assert contents(folder_of(place, seeded.training)) == listed
    key_file.write_text("not a key")
    refused = tinkex(*words, str(key_file), "--force")
    assert refused.exit_code == 1
    assert "is neither an age identity file nor an SSH private key" in refused.err
    assert contents(folder_of(place, seeded.training)) == listed
