"""Adapter folders of `checkpoint export` and `push-hf`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinkex.cli.commands.checkpoint.export import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAMES,
    DTYPES,
    MODEL_CARD_NAME,
    SERVER_FILE_NAMES,
    _copy_adapter,
    check_adapter,
    format_model_card,
    read_base_model,
    write_model_card,
)
from tinkex.cli.commands.checkpoint.push_hf import sanitize_repo_name
from tinkex.cli.errors import CliError
from tinkex.cli.main import run
from tinkex.engine import config

PATH = "tinker://run/weights/0001"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / ADAPTER_CONFIG_NAME).write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    (folder / ADAPTER_WEIGHTS_NAMES[0]).write_bytes(b"weights")
    return folder


def test_check_adapter_requires_config_and_weights(adapter: Path) -> None:
    check_adapter(adapter, PATH)
    (adapter / ADAPTER_WEIGHTS_NAMES[0]).rename(adapter / ADAPTER_WEIGHTS_NAMES[1])
    check_adapter(adapter, PATH)
    (adapter / ADAPTER_CONFIG_NAME).unlink()
    with pytest.raises(CliError, match="does not contain a PEFT adapter"):
        check_adapter(adapter, PATH)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"base_model_name_or_path": null}', "\0"])
def test_config_without_base_model(text: str, adapter: Path) -> None:
    assert read_base_model(adapter) == "org/base"
    (adapter / ADAPTER_CONFIG_NAME).write_text(text)
    assert read_base_model(adapter) is None
    assert "LoRA rank" not in format_model_card(adapter, PATH, "me/mine")
    assert "base_model:" not in format_model_card(adapter, PATH, "me/mine")


@given(st.text(min_size=1, max_size=30))
def test_model_card_quotes_any_base_model(base_model: str) -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / ADAPTER_CONFIG_NAME).write_text(
            json.dumps({"base_model_name_or_path": base_model})
        )
        _, head, _ = format_model_card(folder, PATH, "me/mine").split("---\n", 2)
    line = next(line for line in head.splitlines() if line.startswith("base_model: "))
    assert json.loads(line.removeprefix("base_model: ")) == base_model


def test_existing_model_card_is_kept(adapter: Path) -> None:
    write_model_card(adapter, PATH, "me/mine")
    first = (adapter / MODEL_CARD_NAME).read_text()
    assert 'PeftModel.from_pretrained(base, "me/mine")' in first
    assert f'tinker_path: "{PATH}"' in first
    write_model_card(adapter, PATH, "me/other")
    assert (adapter / MODEL_CARD_NAME).read_text() == first


@pytest.mark.parametrize("is_scratch", [True, False])
def test_server_files_are_not_exported(is_scratch: bool, adapter: Path) -> None:
    for name in SERVER_FILE_NAMES:
        (adapter / name).write_text("private")
    made = adapter.parent / "made"
    _copy_adapter(adapter, made, SERVER_FILE_NAMES, is_scratch=is_scratch)
    assert {path.name for path in made.iterdir()} == {ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAMES[0]}
    assert adapter.exists() is not is_scratch


def test_copy_error_names_the_file(adapter: Path) -> None:
    (adapter / "broken").symlink_to(adapter / "nowhere")
    with pytest.raises(CliError, match="broken cannot be copied: "):
        _copy_adapter(adapter, adapter.parent / "made", SERVER_FILE_NAMES, is_scratch=False)


def test_dtypes_match_the_engine() -> None:
    assert DTYPES == config.DTYPES


@given(st.text(max_size=200))
@example("..")
def test_sanitized_repo_names_are_valid(text: str) -> None:
    name = sanitize_repo_name(f"tinker-{text}-x")
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,94}[A-Za-z0-9_]", name)
    assert "--" not in name
    assert ".." not in name


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", PATH], "--output"),
        (["export", PATH, "-o", "x", "--merge", "--dtype", "int8"], "int8"),
        (["push-hf", PATH, "--create-pr", "--revision", "v2"], "remove --revision"),
    ],
)
def test_wrong_usage_exits_with_2(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", *words]).exit_code == 2
    assert text in capsys.readouterr().err
