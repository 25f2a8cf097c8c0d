"""A running server reloads the home's list of base models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tinkex.engine.models.sources import BaseModelList, write_model_list
from tinkex.models import TINY


class Engine:
    """Records the models that it was given."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def replace(self, sources: Mapping[str, str]) -> None:
        self.seen.append(list(sources))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.json"


def test_change_is_detected_once(file: Path) -> None:
    models, engine = BaseModelList(file, ["flag=/models/flag"]), Engine()
    assert list(models.read_sources()) == ["flag", TINY]
    assert not models.refresh_if_changed(engine.replace)
    write_model_list(file, {"added": "/models/added"})
    assert models.refresh_if_changed(engine.replace)
    assert not models.refresh_if_changed(engine.replace)
    assert engine.seen == [["added", "flag", TINY]]


def test_change_during_startup_is_detected(file: Path) -> None:
    models, engine = BaseModelList(file, []), Engine()
    write_model_list(file, {"early": "/models/early"})
    assert models.refresh_if_changed(engine.replace)
    assert engine.seen == [["early", TINY]]


def test_removed_list_leaves_built_in_model(file: Path) -> None:
    write_model_list(file, {"added": "/models/added"})
    models, engine = BaseModelList(file, []), Engine()
    file.unlink()
    assert models.refresh_if_changed(engine.replace)
    assert engine.seen == [[TINY]]


def test_damaged_list_is_ignored(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    models, engine = BaseModelList(file, []), Engine()
    file.write_text("{")
    assert not models.refresh_if_changed(engine.replace)
    assert engine.seen == []
    assert "is damaged" in caplog.text
