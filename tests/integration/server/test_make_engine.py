"""Engines that need another process, and the error if PyTorch or transformers is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_vllm import write_python
from tinkex.installation import install_command
from tinkex.models import TINY, built_in
from tinkex.server.config import ServerConfig
from tinkex.server.wiring import make_engine


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_missing_torch_error_names_install_command(tmp_path: Path, library: str) -> None:
    probe = (
        "import sys\n"
        f"sys.modules[{library!r}] = None\n"
        "from pathlib import Path\n"
        "from tinkex.errors import ConfigError\n"
        "from tinkex.server.config import ServerConfig\n"
        "from tinkex.server.wiring import make_engine\n"
        "try:\n"
        f"    make_engine(ServerConfig(home=Path({str(tmp_path)!r})))\n"
        "except ConfigError as error:\n"
        "    print(error.message)\n"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"the engine 'local' needs {library}, which is not installed" in run.stdout
    assert install_command("server", "torch") in run.stdout


def test_vllm_serves_a_model_that_is_known_by_name(tmp_path: Path) -> None:
    python = write_python(tmp_path / "fake")
    config = ServerConfig(
        home=tmp_path, engine="vllm", models=(TINY,), vllm_python=str(python), max_sequences=3
    )
    engine = make_engine(config)
    (model,) = engine.base_models()
    assert (model.name, model.tokenizer_folder) == (TINY, built_in()[TINY])
    assert engine.max_samples == 3
    engine.close()
