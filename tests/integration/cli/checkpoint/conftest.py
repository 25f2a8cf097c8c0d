"""Fixtures for downloads: a directory, and a checkpoint with single files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.conftest import SeededServer
from tests.integration.conftest import BASE_MODEL, TIMEOUT_SECONDS, Connect


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Directory for downloads, next to the test's home."""
    made = tmp_path / "models"
    made.mkdir()
    return made


@pytest.fixture
def external(seeded: SeededServer, connect: Connect) -> str:
    """A checkpoint that the server offers as single files."""
    trainer = connect(seeded.server).create_lora_training_client(BASE_MODEL, rank=4)
    return trainer.save_weights_external("out").result(TIMEOUT_SECONDS).path
