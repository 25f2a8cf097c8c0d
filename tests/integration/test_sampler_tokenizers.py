"""Which tokenizer a sampling client loads: the server's, else one from the Hub."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path

import pytest

from tests.integration.conftest import KEY, Connect, Serve
from tinkex.engine.fake.toy_tokenizer import ToyTokenizer
from tinkex.errors import InvalidInput
from tinkex.models import TINY_FOLDER
from tinkex.testing import Fault, StubServer
from tinkex.text import load_tokenizer
from tinkex.tokenizer_files import digest_files, read_tokenizer_files

LLAMA = "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({}, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ({"tokenizer_id": "/models/mine"}, "/models/mine"),
    ],
)
def test_server_tokenizer_is_preferred(
    told: dict[str, str], wanted: str, serve: Serve, connect: Connect
) -> None:
    loaded: list[str] = []

    def load(name: str) -> ToyTokenizer:
        loaded.append(name)
        return ToyTokenizer()

    server = serve(api_keys={KEY}, models=(LLAMA,))
    service = connect(server, tokenizer_loader=load)
    sampler = service.create_sampling_client(base_model=LLAMA)
    body = {"sampler_id": sampler.sampling_session_id, "base_model": LLAMA, **told}
    server.inject("get_sampler", Fault(status=200, body=body), times=None)

    assert isinstance(sampler.get_tokenizer(), ToyTokenizer)
    assert loaded == [wanted]
    assert sampler.get_base_model() == LLAMA


# --- from the server -------------------------------------------------------------------------
TINY_FILES = read_tokenizer_files(TINY_FOLDER)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


def offer(server: StubServer, files: dict[str, bytes], digest: str = "") -> None:
    """Make a server return these files for every request."""
    body = {
        "base_model": LLAMA,
        "tokenizer_id": LLAMA,
        "digest": digest or digest_files(files),
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }
    server.inject("get_tokenizer", Fault(status=200, body=body), times=None)


def test_tokenizer_is_cached_by_digest(serve: Serve, connect: Connect, home: Path) -> None:
    server = serve(api_keys={KEY}, models=(LLAMA,))
    offer(server, TINY_FILES)
    service = connect(server)
    sampler = service.create_sampling_client(base_model=LLAMA)
    training = service.create_lora_training_client(LLAMA)

    found = [sampler.get_tokenizer(), training.get_tokenizer(), sampler.get_tokenizer()]

    folder = home / "tokenizers" / digest_files(TINY_FILES)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == TINY_FILES
    expected = load_tokenizer(str(TINY_FOLDER)).encode("Hello there")
    assert all(each.encode("Hello there") == expected for each in found)
    asked = [dict(call.query) for call in server.calls("get_tokenizer")]
    with_files = {"base_model": LLAMA, "digest": digest_files(TINY_FILES)}
    assert asked == [
        {"base_model": LLAMA},
        with_files,
        {"base_model": LLAMA},
        {"base_model": LLAMA},
    ]


@pytest.mark.parametrize(
    ("files", "digest", "sentence"),
    [
        (TINY_FILES, "0" * 64, "do not have the digest"),
        (TINY_FILES, "../" * 21 + "x", "invalid tokenizer digest"),
        ({"../../evil": b"x"}, "", "is not a file of a tokenizer"),
    ],
)
def test_invalid_tokenizer_files_are_rejected(
    files: dict[str, bytes],
    digest: str,
    sentence: str,
    serve: Serve,
    connect: Connect,
    home: Path,
) -> None:
    server = serve(api_keys={KEY}, models=(LLAMA,))
    offer(server, files, digest)
    sampler = connect(server).create_sampling_client(base_model=LLAMA)
    with pytest.raises(InvalidInput, match=sentence):
        sampler.get_tokenizer()
    assert not home.exists()


def test_server_without_tokenizers_falls_back_to_hub(serve: Serve, connect: Connect) -> None:
    server = serve(api_keys={KEY}, models=("unknown/model",))
    sampler = connect(server).create_sampling_client(base_model="unknown/model")
    with pytest.raises(InvalidInput, match="Failed to load tokenizer 'unknown/model'"):
        sampler.get_tokenizer()


def test_tokenizer_cache_is_bounded(
    serve: Serve, connect: Connect, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.tokenizer_files.MAX_CACHED_TOKENIZERS", 2)
    server = serve(api_keys={KEY}, models=(LLAMA,))
    sampler = connect(server).create_sampling_client(base_model=LLAMA)
    digests = []
    for age in (30, 20, 10):
        files = {**TINY_FILES, "chat_template.jinja": str(age).encode()}
        digests.append(digest_files(files))
        server.clear_faults()
        offer(server, files)
        sampler.get_tokenizer()
        stamp = time.time() - age
        os.utime(home / "tokenizers" / digests[-1], (stamp, stamp))
    assert {path.name for path in (home / "tokenizers").iterdir()} == set(digests[1:])
