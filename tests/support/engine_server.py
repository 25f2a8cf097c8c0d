"""Real servers with the real engine, and tiny base models for them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tests.support.serve_process import ServeProcess, eventually
from tests.support.tiny_model_folders import save_tiny
from tinkex.cli.main import main

#: Every byte has its token, and there are three special ones.
VOCAB_SIZE = 259
#: The context of the second model, which is short.
FEW_TOKENS = 64


def make_folders(directory: Path) -> dict[str, Path]:
    """Two base models that differ in weights, head and context."""
    return {
        "tiny": save_tiny(directory / "tiny", vocab_size=VOCAB_SIZE),
        "other": save_tiny(
            directory / "other",
            vocab_size=VOCAB_SIZE,
            seed=5,
            tie_word_embeddings=False,
            max_position_embeddings=FEW_TOKENS,
        ),
    }


class LocalServer(ServeProcess):
    """A server that trains some folders' models on one thread."""

    def __init__(self, home: Path, folders: Mapping[str, Path], **settings: Any) -> None:
        self.folders = dict(folders)
        told = {f"TINKEX_{name.upper()}": str(value) for name, value in settings.items()}
        models = [word for name in folders for word in ("--model", f"{name}={folders[name]}")]
        super().__init__(
            *(home, "--engine", "local", *models),
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TINKEX_THREADS": "1"} | told,
        )

    def new_key(self, tenant: str) -> str:
        """Create a key for a tenant with the CLI while the server runs."""
        command = ["key", "create", "--home", str(self.home.root), "--tenant", tenant, "--json"]
        answer = CliRunner().invoke(main, command, catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        secret: str = json.loads(answer.stdout)["key"]
        return secret

    def kill_worker(self) -> None:
        """kill -9 the worker, and wait for a new one."""
        victims = self.pids("worker")
        os.kill(victims[-1], signal.SIGKILL)
        eventually(lambda: len(self.pids("worker")) > len(victims))
