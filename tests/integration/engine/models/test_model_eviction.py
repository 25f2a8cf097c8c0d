"""An engine whose base models do not fit into memory together gives identical results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import engine_calls
from tests.support.tiny_model_folders import save_tiny
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.protocol import Pass, SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.types import (
    ForwardBackwardOutput,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)

MODELS = ("one", "two")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models of the same size and different weights."""
    directory = tmp_path_factory.mktemp("models")
    return {
        name: str(save_tiny(directory / name, seed=seed)) for seed, name in enumerate(MODELS, 3)
    }


@pytest.fixture
def engines(sources: dict[str, str]) -> Iterator[tuple[TorchEngine, TorchEngine]]:
    """An engine with memory for both models, and one with memory for one."""
    size = read_model_folder(Path(sources["one"])).num_bytes("float32")
    roomy = TorchEngine(sources, EngineConfig())
    tight = TorchEngine(sources, EngineConfig(memory_bytes=size + 4000))
    yield roomy, tight
    roomy.close()
    tight.close()


def test_training_is_identical_under_model_eviction(
    engines: tuple[TorchEngine, TorchEngine],
) -> None:
    for engine in engines:
        for name in MODELS:
            engine.create(name, replace(engine_calls.spec(), base_model=name))
    for number in range(3):
        passes = [
            Pass(adapter_id=name, request=engine_calls.work(engine_calls.datum(number)))
            for name in MODELS
        ]
        outcomes = [engine.run_passes(passes) for engine in engines]
        for roomy, tight in zip(*outcomes, strict=True):
            assert isinstance(roomy, ForwardBackwardOutput)
            assert isinstance(tight, ForwardBackwardOutput)
            assert roomy.metrics == tight.metrics
        for engine in engines:
            for name in MODELS:
                engine_calls.step(engine, name)
    assert [len(engine._registry.loaded_names) for engine in engines] == [2, 1]
    for name in MODELS:
        assert torch.equal(*(engine_calls.weights(engine, name) for engine in engines))


def test_samples_are_identical_after_model_reload(engines: tuple[TorchEngine, TorchEngine]) -> None:
    def sample(engine: TorchEngine, name: str) -> SampleResponse:
        request = SampleRequest(
            prompt=ModelInput.from_ints([5, 6, 7]),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=6, seed=1),
        )
        engine.start_sample("job", SamplerSource(base_model=name), request)
        while not (finished := engine.step_samples()):
            pass
        outcome = finished[0].outcome
        assert isinstance(outcome, SampleResponse), outcome
        return outcome

    roomy, tight = engines
    for name in (*MODELS, *MODELS):
        expected, found = (sample(engine, name).sequences[0] for engine in (roomy, tight))
        assert list(found.tokens) == list(expected.tokens)
        assert list(found.logprobs or ()) == list(expected.logprobs or ())
