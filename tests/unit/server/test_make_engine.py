"""Creation of the engine, and the error if PyTorch is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinkex.engine.config import EngineConfig
from tinkex.engine.fake.engine import FakeEngine
from tinkex.errors import ConfigError
from tinkex.server.config import ServerConfig
from tinkex.server.wiring import _register_tokenizers, make_engine


def test_fake_engine_is_opt_in(tmp_path: Path) -> None:
    assert ServerConfig(home=tmp_path).engine == "local"
    engine = make_engine(ServerConfig(home=tmp_path, engine="fake", models=("our/model",)))
    assert isinstance(engine, FakeEngine)
    assert [model.name for model in engine.base_models()] == ["our/model"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"models": ("a=/x",)}, "the engine 'vllm' needs vllm_python"),
        ({"vllm_python": "/x"}, "serves one base model, but 0 are given"),
        ({"vllm_python": "/x", "models": ("a=/x", "b=/x")}, "one base model, but 2 are given"),
        ({"vllm_python": "/x", "models": ("a=/nothing",)}, "folder /nothing does not exist"),
    ],
)
def test_vllm_without_its_settings_is_one_sentence(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_engine(ServerConfig(home=tmp_path, engine="vllm", **settings))


def test_engine_settings_match_server_settings(tmp_path: Path) -> None:
    config = ServerConfig(
        home=tmp_path,
        device="cuda:1",
        dtype="bfloat16",
        threads=3,
        deterministic=True,
        pass_tokens=5,
        cache_bytes=6,
        packed_bytes=9,
        max_sequences=7,
        memory_bytes=8,
        apply_nonfinite=True,
    )
    assert config.engine_config == EngineConfig(
        device="cuda:1",
        dtype="bfloat16",
        threads=3,
        is_deterministic=True,
        pass_tokens=5,
        cache_bytes=6,
        packed_bytes=9,
        max_sequences=7,
        memory_bytes=8,
        is_nonfinite_applied=True,
    )
    assert ServerConfig(home=tmp_path).engine_config == EngineConfig()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("device", "the gpu", "device is 'the gpu'; expected auto, cpu, cuda or cuda:N"),
        ("device", "", "device is ''"),
        ("dtype", "int8", "dtype is 'int8'; expected one of float32, bfloat16, float16"),
        ("threads", -1, "threads is -1"),
        ("pass_tokens", 0, "pass_tokens is 0; expected at least 1"),
        ("cache_bytes", 0, "cache_bytes is 0"),
        ("packed_bytes", -1, "packed_bytes is -1; expected 0 or more"),
        ("max_sequences", -5, "max_sequences is -5"),
        ("memory_bytes", -1, "memory_bytes is -1; expected 0 or more"),
    ],
)
def test_invalid_engine_setting_is_named(
    tmp_path: Path, field: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(home=tmp_path, **{field: value})
    assert words in refused.value.message


def test_tokenizers_of_flags_are_registered_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    config = ServerConfig(home=tmp_path, models=(f"mine={folder}", "org/on-the-hub"))
    _register_tokenizers(config)
    cache = tmp_path / "hub" / "hub"
    names = {"models--mine", "models--tinkex--tiny"}
    assert {path.name for path in cache.iterdir()} == names
    _register_tokenizers(replace(config, register_tokenizers=False))
    assert list(cache.iterdir()) == []
