"""A quick run of the tinkex/tiny recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tinkex.engine.models.model_folder import read_model_folder
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.text import load_tokenizer, render_chat

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def make_tiny(directory: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "make_tiny.sh"
    places = ["--work", str(directory / "work"), "--out", str(directory / "tiny")]
    return subprocess.run(
        [str(script), "--quick", *places],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_run")
    done = make_tiny(directory)
    assert done.returncode == 0, done.stderr
    assert "parameters, " in done.stdout.splitlines()[-1]
    return directory


def test_folder_loads_in_server_and_transformers(tiny_run: Path) -> None:
    folder = read_model_folder(tiny_run / "tiny")
    assert (folder.dtype, folder.has_tokenizer) == ("float16", True)
    model = AutoModelForCausalLM.from_pretrained(folder.path)
    assert model.num_parameters() == folder.weights.num_parameters
    tokens = render_chat(load_tokenizer(str(folder.path)), [{"role": "user", "content": "Hello"}])
    assert max(tokens) < model.config.vocab_size
    assert (folder.path / "README.md").read_text().count(" % |") == 13


def test_second_run_trains_nothing(tiny_run: Path) -> None:
    before = digest_weights(tiny_run / "tiny")
    again = make_tiny(tiny_run)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("nothing to do") == 4
    assert digest_weights(tiny_run / "tiny") == before


def test_run_from_scratch_is_reproducible(tiny_run: Path, tmp_path: Path) -> None:
    done = make_tiny(tmp_path)
    assert done.returncode == 0, done.stderr
    assert digest_weights(tmp_path / "tiny") == digest_weights(tiny_run / "tiny")
