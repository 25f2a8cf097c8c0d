"""`checkpoint download` without a server: names, existing folders, progress bars."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.checkpoint.download import (
    DownloadProgressBars,
    check_not_exists,
    checkpoint_folder_name,
    scratch_directory,
)
from tinkex.cli.context import Context, Screen
from tinkex.cli.errors import CliError
from tinkex.cli.main import run
from tinkex.cli.output.checkpoints import CheckpointDownload, FileTotals
from tinkex.ids import TinkerPath

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._:+=@~-]{0,30}", fullmatch=True)


def test_folder_name_matches_official_cli() -> None:
    path = TinkerPath("run-123", "weights", "final")
    assert checkpoint_folder_name(path) == "run-123_weights_final"


def test_folder_name_has_no_colon() -> None:
    path = TinkerPath("82810c9f:train:0", "weights", "final")
    assert checkpoint_folder_name(path) == "82810c9f_train_0_weights_final"


@given(NAMES, st.sampled_from(["weights", "sampler_weights", "external_weights"]), NAMES)
def test_folder_name_stays_inside_output(run_id: str, segment: str, name: str) -> None:
    found = checkpoint_folder_name(TinkerPath(run_id, segment, name))
    assert (Path("here") / found).parent == Path("here")
    assert found not in {".", ".."}


def test_existing_destination_is_rejected(tmp_path: Path) -> None:
    check_not_exists(tmp_path / "new", force=False)
    check_not_exists(tmp_path, force=True)
    with pytest.raises(CliError, match="already exists"):
        check_not_exists(tmp_path, force=False)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CliError, match="already exists"):
        check_not_exists(tmp_path / "broken", force=False)


def test_existing_destination_sends_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: object) -> None:
        raise AssertionError("a server was asked")

    run_id = "82810c9f-dd83-49e2-8069-20d10792b196:train:0"
    (tmp_path / f"{run_id}_weights_x".replace(":", "_")).mkdir()
    context = Context(make_service=refuse, api_key="tml-x", base_url="http://x")  # type: ignore[arg-type]
    words = ["checkpoint", "download", f"tinker://{run_id}/weights/x", "-o", str(tmp_path)]
    assert run(words, context).exit_code == 1
    assert "already exists" in capsys.readouterr().err


def test_scratch_directory_is_always_deleted(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        scratch_directory(tmp_path / "deep" / "out") as scratch,
    ):
        (scratch / "file").write_text("x")
        assert scratch.parent == tmp_path / "deep"
        raise KeyboardInterrupt
    assert list((tmp_path / "deep").iterdir()) == []


def test_file_totals_ignore_symlinks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    (tmp_path / "c").write_bytes(b"678")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert FileTotals.measure(tmp_path) == FileTotals(num_bytes=8, num_files=2)
    assert FileTotals.measure(tmp_path / "c") == FileTotals(num_bytes=3, num_files=1)


def test_json_has_official_keys() -> None:
    shown = CheckpointDownload("tinker://r/weights/x", Path("here"), FileTotals(2048, 3))
    assert shown.to_dict() == {
        "checkpoint_path": "tinker://r/weights/x",
        "destination": "here",
        "file_size_bytes": 2048,
        "num_files": 3,
    }
    assert ("Total Size", "2.0 kB") in shown.rows()


def test_download_and_unpack_bars(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(is_terminal=True, width=100)
    with DownloadProgressBars(Context(stderr=screen)) as phases:
        phases.on_bytes(512, 2048)
        phases.on_bytes(2048, 2048)
        phases.on_files(1, None)
        phases.on_files(7, 7)
    shown = capsys.readouterr().err
    assert shown.index("Downloading") < shown.index("Unpacking")
    assert "7/7" in shown
    with DownloadProgressBars(Context(stderr=Screen())) as phases:
        phases.on_bytes(1, None)
    assert capsys.readouterr().err == ""
