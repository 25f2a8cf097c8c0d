"""The engine with vLLM itself, compared with ours; needs `scripts/install-vllm.sh`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serve_process import eventually
from tinkex import types
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.protocol import AdapterSpec, Declined, Engine, Pass, SamplerSource
from tinkex.engine.vllm.bridge import VllmConfig, VllmEngine
from tinkex.models import TINY, built_in

VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", Path(__file__).parents[4] / ".vllm/bin/python"))
#: Of float32 log-probabilities that two engines compute.
TOLERANCE = 1e-4
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="run scripts/install-vllm.sh"),
]


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    from tinkex.engine.torch_engine import TorchEngine

    engine = TorchEngine(built_in(), EngineConfig(threads=1))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmEngine]:
    """One that scores prompts, because it does not apply adapters to the unembedding."""
    options = {"enforce_eager": True, "max_loras": 2, "lora_target_modules": PROJECTIONS}
    folder = read_model_folder(Path(built_in()[TINY]))
    engine = VllmEngine(
        VllmConfig(python=str(VLLM_PYTHON), base_model=TINY, folder=folder, options=options)
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapters(ours: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Trained adapters without an unembedding."""
    folders = []
    for seed in range(3):
        spec = AdapterSpec(base_model=TINY, rank=4 + seed, seed=seed, train_unembed=False)
        ours.create("a", spec)
        tokens = [(7 * seed + 13 * index) % 1500 + 3 for index in range(30)]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 29},
        )
        request = types.ForwardBackwardInput([datum], "cross_entropy")
        for _ in range(3):
            ours.run_passes([Pass(adapter_id="a", request=request)])
            ours.optim_step("a", types.AdamParams(learning_rate=1e-2))
        folders.append(tmp_path_factory.mktemp("adapter"))
        ours.save("a", folders[-1], with_optimizer=False)
    return folders


def prompt_of(number: int) -> list[int]:
    return [(31 * number + 17 * index) % 1500 + 3 for index in range(12 + number)]


def request(prompt: list[int], max_tokens: int = 24, **options: Any) -> types.SampleRequest:
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=5, stop=[])
    return types.SampleRequest(
        prompt=types.ModelInput.from_ints(prompt), sampling_params=params, **options
    )


def run(engine: Engine, requests: dict[str, tuple[Path | None, types.SampleRequest]]) -> Any:
    """Run requests together; returns the outcomes by id."""
    for job_id, (directory, sample) in requests.items():
        engine.start_sample(job_id, SamplerSource(base_model=TINY, directory=directory), sample)
    outcomes: dict[str, Any] = {}
    eventually(lambda: bool(outcomes.update(engine.step_samples())) or not engine.num_samples)
    return outcomes


def test_mixed_batch_agrees_with_ours(vllm: VllmEngine, ours: Any, adapters: list[Path]) -> None:
    sources = [None, *adapters] * 3
    requests = {
        str(number): (source, request(prompt_of(number))) for number, source in enumerate(sources)
    }
    sampled = run(vllm, requests)
    scores = {}
    for job_id, (source, sample) in requests.items():
        tokens = sampled[job_id].sequences[0].tokens
        whole = [*sample.prompt.to_ints(), *tokens]
        scores[job_id] = (source, request(whole, 1, prompt_logprobs=True))
    expected = run(ours, scores)
    for job_id in requests:
        logprobs = sampled[job_id].sequences[0].logprobs
        scored = expected[job_id].prompt_logprobs[-len(logprobs) :]
        assert logprobs == pytest.approx(scored, abs=TOLERANCE)


def test_scores_of_prompts_agree_with_ours(
    vllm: VllmEngine, ours: Any, adapters: list[Path]
) -> None:
    for number, source in enumerate([None, *adapters]):
        sample = request(prompt_of(number), 1, prompt_logprobs=True, topk_prompt_logprobs=3)
        got, expected = (run(engine, {"a": (source, sample)})["a"] for engine in (vllm, ours))
        assert got.prompt_logprobs[0] is None and got.topk_prompt_logprobs[0] is None
        assert got.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=TOLERANCE)
        rows = zip(got.topk_prompt_logprobs[1:], expected.topk_prompt_logprobs[1:], strict=True)
        for own, other in rows:
            assert [value for _, value in own] == pytest.approx(
                [value for _, value in other], abs=TOLERANCE
            )


def test_damaged_adapter_is_declined(
    vllm: VllmEngine, adapters: list[Path], tmp_path: Path
) -> None:
    damaged = shutil.copytree(adapters[0], tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"damaged")
    requests = {"bad": (damaged, request([5, 6])), "good": (adapters[0], request([5, 6]))}
    outcomes = run(vllm, requests)
    assert isinstance(outcomes["bad"], Declined)
    assert len(outcomes["good"].sequences[0].tokens) == 24


def test_cancelled_sample_makes_room(vllm: VllmEngine) -> None:
    vllm.start_sample("endless", SamplerSource(base_model=TINY), request([5], 2000, num_samples=8))
    vllm.step_samples()
    vllm.cancel_sample("endless")
    assert vllm.num_samples == 0
    assert run(vllm, {"next": (None, request([5, 6], 4))})["next"].sequences[0].tokens
