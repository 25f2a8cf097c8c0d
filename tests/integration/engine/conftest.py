"""A tiny base model on disk with its own tokenizer, and engines that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_model_folders import save_tiny
from tinkex.engine.config import EngineConfig
from tinkex.engine.torch_engine import TorchEngine

#: What clients call the tiny model.
NAME = "tiny"
MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because tests run in parallel processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers saves it."""
    return save_tiny(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture
def make_engine(folder: Path) -> Iterator[MakeEngine]:
    """Creates engines that serve the tiny model, and closes them at the end."""
    made: list[TorchEngine] = []

    def make(**settings: Any) -> TorchEngine:
        made.append(TorchEngine({NAME: str(folder)}, EngineConfig(**settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> TorchEngine:
    """An engine with default settings."""
    return make_engine()
