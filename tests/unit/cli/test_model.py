"""`tinkex model`: adding, listing and removing models, errors and light imports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.gguf_files import write_gguf
from tests.support.model_folder_files import NUM_PARAMETERS, safetensors, write_folder
from tinkex.cli.context import Context, Screen
from tinkex.cli.main import main, run
from tinkex.engine.models.sources import read_model_list
from tinkex.home import Home
from tinkex.models import TINY_FOLDER
from tinkex.server.process.home_setup import HomeLock


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home for this test; the working directory is next to it."""
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path / "home")


def tinkex(*words: str) -> Result:
    return CliRunner().invoke(main, ["model", *words])


def run_json(*words: str) -> Any:
    """Run a command and return its JSON output."""
    done = tinkex(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def added_rows(*words: str) -> list[Any]:
    """Return the listed models without the built-in one."""
    *added, built_in = run_json("list", *words)
    assert (built_in["name"], built_in["built_in"]) == ("tinkex/tiny", True)
    return added


def run_failing(*words: str) -> str:
    done = tinkex(*words)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    return done.stderr


def test_tokenizer_is_registered_and_unregistered(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "small")
    (folder / "tokenizer.json").write_text("{}")
    entry = tmp_path / "hub" / "hub" / "models--org--mine"
    said = tinkex("add", "org/mine", "small")
    assert "AutoTokenizer.from_pretrained('org/mine') finds its tokenizer" in said.stderr
    assert (entry / "refs" / "main").is_file()
    assert tinkex("remove", "org/mine").exit_code == 0
    assert not entry.exists()


def test_tokenizer_registration_is_skipped(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small")
    (folder / "tokenizer.json").write_text("{}")
    entry = tmp_path / "hub" / "hub" / "models--org--mine"
    assert (
        run_json("add", "org/mine", "small", "--no-register-tokenizer")["tokenizer_registered"]
        is False
    )
    assert not entry.exists()
    entry.mkdir(parents=True)
    assert run_json("add", "org/mine", "small")["tokenizer_registered"] is False
    assert tinkex("remove", "org/mine").exit_code == 0
    assert entry.is_dir()


def test_unwritable_hub_cache_is_reported_without_failing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small")
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "hub").write_text("")
    done = tinkex("add", "org/mine", "small")
    assert done.exit_code == 0 and "cannot be written. The official SDK" in done.stderr


def test_add_list_info_remove(tmp_path: Path, home: Home) -> None:
    folder = write_folder(tmp_path / "models" / "small")
    added = tinkex("add", "org/mine", "models/small")
    assert added.exit_code == 0, added.output
    assert added.stdout == ""
    said = "org/mine is Qwen3ForCausalLM, 44 parameters, in "
    assert added.stderr == f"{said}{folder}\n"
    assert read_model_list(home.models_file) == {"org/mine": str(folder)}
    [row] = added_rows()
    assert row == {
        "name": "org/mine",
        "arch": "Qwen3ForCausalLM",
        "parameters": NUM_PARAMETERS,
        "context": 256,
        "place": str(folder),
        "problem": None,
        "built_in": False,
    }
    shown = run_json("info", "org/mine")
    assert (shown["folder"], shown["tokenizer"]) == (str(folder), False)
    assert (shown["float32_bytes"], shown["bfloat16_bytes"]) == (176, 88)
    assert tinkex("remove", "org/mine").stderr == "org/mine is no longer served\n"
    assert added_rows() == []
    assert folder.is_dir()


def test_folder_without_name_uses_its_own_name(tmp_path: Path, home: Home) -> None:
    folder = write_folder(tmp_path / "small")
    for word, name in (("small", "small"), ("./small", "small"), (str(folder), "small")):
        assert tinkex("add", word).exit_code == 0
        assert read_model_list(home.models_file) == {name: str(folder)}


def test_adding_a_name_again_replaces_it(tmp_path: Path, home: Home) -> None:
    for name in ("one", "two"):
        write_folder(tmp_path / name)
        assert tinkex("add", "mine", name).exit_code == 0
    assert read_model_list(home.models_file) == {"mine": str(tmp_path / "two")}


def test_table_output(tmp_path: Path) -> None:
    write_folder(tmp_path / "small")
    nothing = tinkex("list")
    assert nothing.exit_code == 0
    assert re.search(r"tinkex/tiny.+built in", nothing.stdout)
    assert "`tinkex model add smollm2-135m` adds a small chat model" in nothing.stderr
    tinkex("add", "small")
    assert "adds a small chat model" not in tinkex("list").stderr
    shown = tinkex("list").stdout
    assert re.findall(r"[A-Z]\w+", shown)[:5] == [
        "Name",
        "Architecture",
        "Parameters",
        "Context",
        "Place",
    ]
    assert "Problem" not in shown
    assert "float32 Bytes" in tinkex("info", "small").stdout


def test_damaged_model_is_listed_with_problem(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "small") / "model.safetensors"
    tinkex("add", "small")
    path.write_bytes(safetensors()[:-1])
    [row] = added_rows()
    assert "cannot be read: it has" in row["problem"]
    assert "Problem" in tinkex("list").stdout
    assert "cannot be read: it has" in run_failing("info", "small")


def test_unsupported_model_is_not_added(tmp_path: Path, home: Home) -> None:
    (tmp_path / "empty").mkdir()
    assert f"Error: folder {tmp_path / 'none'} does not exist" in run_failing("add", "x", "./none")
    assert "has no config.json" in run_failing("add", "x", "empty")
    write_folder(tmp_path / "small")
    assert "is not a valid model name" in run_failing("add", "a b", "small")
    assert not home.models_file.exists()


def test_unknown_model_error_lists_available_models(tmp_path: Path) -> None:
    assert "available: none" in run_failing("remove", "x")
    write_folder(tmp_path / "small")
    tinkex("add", "small")
    assert "no model 'x'" in run_failing("remove", "x")
    assert "available: small, tinkex/tiny" in run_failing("info", "x")


def test_damaged_model_list_is_an_error_and_not_overwritten(tmp_path: Path, home: Home) -> None:
    write_folder(tmp_path / "small")
    home.create()
    home.models_file.write_text("{")
    for words in (("add", "small"), ("list",), ("remove", "small"), ("info", "small")):
        assert "is damaged; expected" in run_failing(*words)
    assert home.models_file.read_text() == "{"


def test_notice_while_home_is_locked(tmp_path: Path, home: Home) -> None:
    write_folder(tmp_path / "small")
    lock = HomeLock.acquire(home)
    try:
        assert "starts serving it when its current work is done" in tinkex("add", "small").stderr
        assert "stops serving it when its current work" in tinkex("remove", "small").stderr
    finally:
        lock.release()
    assert "server" not in tinkex("add", "small").stderr


# --- the model that is built in -----------------------------------------------------------------


def test_built_in_model_cannot_be_removed_or_replaced(tmp_path: Path, home: Home) -> None:
    assert run_json("info", "tinkex/tiny")["folder"] == str(TINY_FOLDER)
    assert "tinkex/tiny is built in and cannot be removed" in run_failing("remove", "tinkex/tiny")
    write_folder(tmp_path / "small")
    for words in (("tinkex/tiny",), ("tinkex/tiny", "small")):
        assert "tinkex/tiny is built in" in run_failing("add", *words)
    assert not home.models_file.exists()


def test_substring_matches_built_in_model(tmp_path: Path) -> None:
    assert [row["name"] for row in run_json("list", "TINY")] == ["tinkex/tiny"]
    assert "available: tinkex/tiny" in run_failing("list", "nothing")


# --- models that are made here ------------------------------------------------------------------


def test_gguf_file_is_converted_into_home(tmp_path: Path, home: Home) -> None:
    write_gguf(tmp_path / "small.gguf")
    added = tinkex("add", "org/mine", "small.gguf")
    assert added.exit_code == 0, added.output
    folder = home.models / "org@mine"
    assert added.stderr.startswith("org/mine is LlamaForCausalLM, ")
    assert read_model_list(home.models_file) == {"org/mine": str(folder)}
    assert run_json("info", "org/mine")["tokenizer"] is True
    # The converted model does not need the GGUF file.
    (tmp_path / "small.gguf").unlink()
    assert [row["problem"] for row in added_rows()] == [None]


def test_gguf_file_without_name_uses_its_own_name(tmp_path: Path, home: Home) -> None:
    write_gguf(tmp_path / "small.gguf")
    assert run_json("add", "small.gguf")["name"] == "small"
    assert read_model_list(home.models_file) == {"small": str(home.models / "small")}


def test_damaged_gguf_leaves_no_files(tmp_path: Path, home: Home) -> None:
    (tmp_path / "small.gguf").write_bytes(write_gguf(tmp_path / "whole").read_bytes()[:-1])
    assert "is truncated" in run_failing("add", "mine", "small.gguf")
    assert "cannot be converted" in run_failing("add", "mine", "none.gguf")
    assert "begins with a dot" in run_failing("add", ".mine", "small.gguf")
    assert not home.models_file.exists()
    assert not home.models.exists() or list(home.models.iterdir()) == []


def test_leftover_scratch_directories_are_removed(tmp_path: Path, home: Home) -> None:
    (home.models / ".partial-1").mkdir(parents=True)
    write_gguf(tmp_path / "small.gguf")
    assert tinkex("add", "small.gguf").exit_code == 0
    assert [path.name for path in home.models.iterdir()] == ["small"]


def test_folder_with_pip_model_name_is_used_as_folder(tmp_path: Path, home: Home) -> None:
    folder = write_folder(tmp_path / "smollm2-135m")
    assert tinkex("add", "smollm2-135m").exit_code == 0
    assert read_model_list(home.models_file) == {"smollm2-135m": str(folder)}


def test_each_home_has_its_own_models(tmp_path: Path, home: Home) -> None:
    write_folder(tmp_path / "small")
    assert tinkex("add", "small", "--home", str(tmp_path / "other")).exit_code == 0
    assert not home.models_file.exists()
    assert [row["name"] for row in added_rows("--home", str(tmp_path / "other"))] == ["small"]


def test_hub_download_shows_bar_and_handles_ctrl_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __init__(self, on_progress: Callable[[int, int], None]) -> None:
            self._on_progress = on_progress

        def find(self, model_id: str) -> None:
            self._on_progress(5_000_000, 20_000_000)
            raise KeyboardInterrupt

    monkeypatch.setattr("tinkex.engine.models.hub_download.Hub", Interrupted)
    context = Context(stderr=Screen(is_terminal=True, width=120))
    outcome = run(["model", "add", "org/small"], context)
    shown = capsys.readouterr()
    assert (outcome.exit_code, shown.out) == (130, "")
    assert "Downloading org/small" in shown.err
    assert "5.0/20.0 MB" in shown.err
    assert "Error" not in shown.err
    assert shown.err.endswith(
        "Interrupted: the complete files are kept.\n"
        "Run the same command again to download the rest.\n"
    )


def test_ctrl_c_during_conversion_reports_not_added(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinkex.cli.commands.model_registration.make_model_folder", interrupt)
    assert run(["model", "add", "smollm2-135m"]).exit_code == 130
    assert capsys.readouterr().err == "Interrupted: smollm2-135m was not added.\n"
