"""Base models of a real server: from its home, from flags, none, and invalid ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import TIMEOUT_SECONDS, run_tinkex
from tests.support.tiny_model_folders import save_tiny
from tinkex.engine.models.hub_tokenizers import hub_cache_directory
from tinkex.errors import BadRequestError
from tinkex.models import TINY

LOCAL = ("--engine", "local")
TINY_SERVED = {TINY: 2048}
#: The official SDK runs in a separate process.
OFFICIAL = """
import json, sys, tinker

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = service.create_lora_training_client(base_model="both", rank=2)
tokenizers = [training.get_tokenizer()]
for name in ("both", "tinkex/tiny"):
    tokenizers.append(service.create_sampling_client(base_model=name).get_tokenizer())
print(json.dumps([tokenizer.decode(tokenizer.encode("hello")) for tokenizer in tokenizers]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "some model", vocab_size=259)


def served(url: str, key: str) -> dict[str, int | None]:
    """The models of a server and their maximum context lengths."""
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        models = service.get_server_capabilities().supported_models
    return {str(model.model_name): model.max_context_length for model in models}


def test_server_without_models_serves_built_in_model(serve: Serve, home: Path) -> None:
    serve_process = serve(home, *LOCAL)
    url = serve_process.ready()
    assert served(url, serve_process.key) == TINY_SERVED
    with tinkex.ServiceClient(base_url=url, api_key=serve_process.key) as service:
        with pytest.raises(BadRequestError, match=f"available: {TINY}"):
            service.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
        service.create_lora_training_client(TINY, rank=4)


def test_first_chat_works_without_setup(home: Path) -> None:
    """Without URL, key and model, a local server starts and serves the built-in model."""
    env = {"TINKEX_HOME": str(home), "TINKER_BASE_URL": "", "TINKER_API_KEY": ""}
    env["TINKEX_ENGINE"] = "local"
    words = ("--prompt", "What is 3 plus 4?", "--chat", "--temperature", "0", "--json")
    try:
        done = run_tinkex("run", "sample", *words, env=env)
        assert done.returncode == 0, done.stderr
        [sequence] = json.loads(done.stdout)["sequences"]
        assert sequence["text"].removesuffix("<|im_end|>") == "7"
    finally:
        assert run_tinkex("serve", "stop", env=env).returncode == 0


def test_model_flags_override_models_of_home(
    serve: Serve, home: Path, folder: Path, tmp_path: Path
) -> None:
    short = save_tiny(tmp_path / "short", vocab_size=259, max_position_embeddings=32)
    for name in ("mine", "both"):
        added = run_tinkex("model", "add", name, str(folder), "--home", str(home))
        assert added.returncode == 0, added.stderr
    serve_process = serve(home, *LOCAL, "--model", f"both={short}", "--model", f"new={short}")
    url = serve_process.ready()
    assert served(url, serve_process.key) == {"mine": 512, "both": 32, "new": 32} | TINY_SERVED
    removed = run_tinkex("model", "remove", "mine", "--home", str(home))
    assert "no longer serves it" in removed.stderr

    with tinkex.ServiceClient(base_url=url, api_key=serve_process.key) as service:
        training = service.create_lora_training_client("both", rank=2)
        assert training.get_tokenizer().decode(training.get_tokenizer().encode("hello")) == "hello"
    done = subprocess.run(
        [sys.executable, "-c", OFFICIAL, url, serve_process.key],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["hello"] * 3
    cache = hub_cache_directory()
    assert (cache / "models--both" / "refs" / "main").is_file()
    assert run_tinkex("model", "remove", "both", "--home", str(home)).returncode == 0
    assert not (cache / "models--both").exists() and not (cache / "models--mine").exists()


def test_invalid_model_prevents_server_start(home: Path, folder: Path) -> None:
    assert run_tinkex("model", "add", "mine", str(folder), "--home", str(home)).returncode == 0
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused = run_tinkex("serve", "--home", str(home), "--port", "0", *LOCAL)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"base model 'mine': {path} cannot be read: it has" in refused.stderr
    assert "Copy or download the folder again." in refused.stderr
    assert "Traceback" not in refused.stderr
