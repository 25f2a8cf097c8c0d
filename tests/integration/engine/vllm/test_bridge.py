"""The engine that samples with vLLM, with a process that speaks the protocol of vLLM's side."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import ENDLESS_TOKENS, MAX_RANK, write_python
from tests.support.model_folder_files import write_folder
from tests.support.serve_process import eventually
from tinkex import types
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.engine.protocol import AdapterSpec, Declined, EngineLost, SamplerSource
from tinkex.engine.vllm import process
from tinkex.engine.vllm.bridge import REFUSAL, VllmConfig, VllmEngine
from tinkex.errors import ConfigError, InvalidInput

MODEL = "tinkex/bigram"
PROMPT = [1, 2, 3, 4]


class Vllm:
    """An engine with the fake process, whose log tells what it received."""

    def __init__(self, root: Path, options: dict[str, object] | None = None, **variables: str):
        self.log = root / "log.jsonl"
        python = write_python(root, FAKE_VLLM_LOG=str(self.log), **variables)
        folder = read_model_folder(write_folder(root / "model"))
        self.engine = VllmEngine(
            VllmConfig(python=str(python), base_model=MODEL, folder=folder, options=options or {})
        )

    def frames(self, type_: str) -> list[Any]:
        frames = [json.loads(line) for line in self.log.read_text().splitlines()[1:]]
        return [frame for frame in frames if frame["type"] == type_]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    started = Vllm(tmp_path_factory.mktemp("vllm"))
    yield started
    started.engine.close()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """One that does not apply adapters to the unembedding, and so scores prompts."""
    started = Vllm(tmp_path_factory.mktemp("scorer"), {"lora_target_modules": ["q_proj"]})
    yield started
    started.engine.close()


def request(
    prompt: list[int] = PROMPT, num_samples: int = 1, **options: Any
) -> types.SampleRequest:
    names = types.SamplingParams.__struct_fields__
    params = {name: options.pop(name) for name in list(options) if name in names}
    return types.SampleRequest(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=num_samples,
        sampling_params=types.SamplingParams(**{"max_tokens": 8, "seed": 3, **params}),
        **options,
    )


def run(
    engine: VllmEngine | FakeEngine,
    sample: types.SampleRequest,
    directory: Path | None = None,
    job_id: str = "job",
    tenant_id: str = "tenant",
) -> Any:
    source = SamplerSource(base_model=MODEL, directory=directory, tenant_id=tenant_id)
    engine.start_sample(job_id, source, sample)
    outcomes: list[Any] = []
    eventually(lambda: bool(outcomes.extend(engine.step_samples()) or outcomes), 20.0)
    assert engine.num_samples == 0
    return outcomes[0].outcome


def test_inference_requests_combine_stop_conditions(vllm: Vllm) -> None:
    params = InferenceParams(max_tokens=4, seed=3, stop_token_ids=(9,))
    sample = InferenceRequest(prompt=types.ModelInput.from_ints(PROMPT), sampling_params=params)
    run(vllm.engine, sample)
    assert vllm.frames("sample")[-1]["params"]["stop_token_ids"] == [9, 256]


def test_grammar_is_left_to_another_engine(vllm: Vllm) -> None:
    params = InferenceParams(max_tokens=4, grammar="{}")
    sample = InferenceRequest(prompt=types.ModelInput.from_ints(PROMPT), sampling_params=params)
    assert isinstance(run(vllm.engine, sample), Declined)


def test_prompt_is_scored_without_sampling(scorer: Vllm) -> None:
    params = InferenceParams(seed=3, is_prompt_only=True)
    sample = InferenceRequest(
        prompt=types.ModelInput.from_ints(PROMPT), sampling_params=params, prompt_logprobs=True
    )
    response = run(scorer.engine, sample)
    assert [(one.tokens, one.stop_reason) for one in response.sequences] == [([], "length")]
    assert response == run(FakeEngine([MODEL]), sample)


def save_adapter(folder: Path, *, rank: int = 8, seed: int = 1, unembed: bool = True) -> Path:
    engine = FakeEngine([MODEL])
    spec = AdapterSpec(base_model=MODEL, rank=rank, seed=seed, train_unembed=unembed)
    engine.create("a", spec)
    folder.mkdir()
    engine.save("a", folder, with_optimizer=False)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_samples": 3, "seed": 2**70 + 5},
        {"temperature": 0.0},
        {"temperature": 0.7, "topk_sample_logprobs": 4},
        {"stop": [7, 8, 9], "max_tokens": 60},
        {"stop": [], "max_tokens": 60},
    ],
)
def test_samples_are_those_of_the_other_side(vllm: Vllm, options: dict[str, Any]) -> None:
    sample = request(**options)
    got = run(vllm.engine, sample)
    seed = (sample.sampling_params.seed or 0) & ((1 << 62) - 1)
    assert got == run(FakeEngine([MODEL]), request(**{**options, "seed": seed}))


def test_prompts_are_scored_without_an_unembedding(scorer: Vllm) -> None:
    for options in ({"prompt_logprobs": True}, {"topk_prompt_logprobs": 3}):
        for last_n in (None, 2):
            sample = request(**options, prompt_logprobs_last_n=last_n)
            assert run(scorer.engine, sample) == run(FakeEngine([MODEL]), sample)


def test_default_stop_tokens_are_those_of_the_model(vllm: Vllm) -> None:
    run(vllm.engine, request(), job_id="default stop")
    (frame,) = [frame for frame in vllm.frames("sample") if frame["id"] == "default stop"]
    assert frame["params"]["stop_token_ids"] == [256]
    assert frame["params"]["detokenize"] is False


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"temperature": 0.001}, "temperature"),
        ({"prompt_logprobs": True}, "unembedding"),
        ({"prompt_alt_tokens_k": 1}, "unembedding"),
        ({"max_tokens": 1000}, "at most 256"),
        ({"stop": ["text"]}, "no tokenizer"),
    ],
)
def test_other_requests_are_declined(vllm: Vllm, options: dict[str, Any], reason: str) -> None:
    outcome = run(vllm.engine, request(**options), job_id="declined")
    assert isinstance(outcome, Declined) and reason in outcome.reason
    assert not [frame for frame in vllm.frames("sample") if frame["id"] == "declined"]


def test_alternatives_of_prompt_tokens_are_declined(scorer: Vllm) -> None:
    assert isinstance(run(scorer.engine, request(prompt_alt_tokens_k=1)), Declined)


def test_adapter_ids_are_never_used_again(vllm: Vllm, tmp_path: Path) -> None:
    first, second = (save_adapter(tmp_path / name) for name in ("first", "second"))
    for directory in (first, second, first):
        expected = run(FakeEngine([MODEL]), request(), directory)
        assert run(vllm.engine, request(), directory, job_id="adapter") == expected
    shutil.rmtree(first)
    save_adapter(tmp_path / "first", seed=2)
    run(vllm.engine, request(), first, job_id="adapter")
    run(vllm.engine, request(), job_id="adapter")
    used = [frame["adapter"] for frame in vllm.frames("sample") if frame["id"] == "adapter"]
    assert used[-1] is None
    ids = [adapter["id"] for adapter in used[:-1]]
    assert ids[0] == ids[2] and len(set(ids)) == 3
    assert used[0]["path"] == str(first)


def test_other_adapters_are_declined(vllm: Vllm, scorer: Vllm, tmp_path: Path) -> None:
    large = save_adapter(tmp_path / "large", rank=MAX_RANK + 1)
    unembed = save_adapter(tmp_path / "unembed")
    rejected = save_adapter(tmp_path / "rejected", unembed=False)
    for engine, directory, reason in [
        (vllm.engine, large, "max_lora_rank"),
        (scorer.engine, unembed, "lora_target_modules"),
        (scorer.engine, rejected, "no such module"),
        (vllm.engine, tmp_path / "missing", "no saved weights"),
    ]:
        outcome = run(engine, request(), directory)
        assert isinstance(outcome, Declined) and reason in outcome.reason
    assert not isinstance(run(vllm.engine, request(), unembed), Declined)


def test_tenants_are_cache_salts(vllm: Vllm) -> None:
    for tenant_id in ("alice", "bob"):
        run(vllm.engine, request(), job_id="salted", tenant_id=tenant_id)
    salts = [frame["salt"] for frame in vllm.frames("sample") if frame["id"] == "salted"]
    assert salts == ["alice", "bob"]


def test_cancelled_sample_ends_without_an_outcome(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SamplerSource(base_model=MODEL)
    endless = types.SamplingParams(max_tokens=ENDLESS_TOKENS)
    # The limit of the context is not that of the fake.
    limits = replace(vllm.engine._limits, max_context_tokens=4096)
    monkeypatch.setattr(vllm.engine, "_limits", limits)
    sample = types.SampleRequest(prompt=types.ModelInput.from_ints(PROMPT), sampling_params=endless)
    vllm.engine.start_sample("endless", source, sample)
    vllm.engine.step_samples()
    assert vllm.engine.num_samples == 1
    vllm.engine.cancel_sample("endless")
    vllm.engine.cancel_sample("unknown")
    assert vllm.engine.num_samples == 0
    eventually(lambda: [frame["id"] for frame in vllm.frames("cancel")] == ["endless"], 20.0)


def test_training_is_refused_with_one_sentence(vllm: Vllm) -> None:
    engine = vllm.engine
    spec = AdapterSpec(base_model=MODEL, rank=8, seed=1)
    for refuse in (
        lambda: engine.create("a", spec),
        lambda: engine.training_bytes(spec),
        lambda: engine.start_passes([]),
        lambda: engine.optim_step("a", types.AdamParams()),
        lambda: engine.save("a", Path(), with_optimizer=False),
        lambda: engine.load("a", Path(), with_optimizer=False),
        lambda: engine.snapshot("a"),
        lambda: engine.restore("a", spec, Path()),
    ):
        with pytest.raises(InvalidInput, match="does not train") as raised:
            refuse()
        assert raised.value.message == REFUSAL
    assert not engine.has_adapter("a") and engine.max_adapter_bytes == 0
    assert [model.is_trainable for model in engine.base_models()] == [False]


@pytest.mark.parametrize("is_idle", [True, False])
def test_dead_process_ends_the_engine(tmp_path: Path, is_idle: bool) -> None:
    vllm = Vllm(tmp_path)
    run(vllm.engine, request())
    os.kill(vllm.engine.pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        eventually(vllm.engine.check_alive if is_idle else lambda: bool(run_again(vllm)), 20.0)
    vllm.engine.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(vllm.engine.pid, 0)


def run_again(vllm: Vllm) -> None:
    vllm.engine.start_sample("again", SamplerSource(base_model=MODEL), request())
    vllm.engine.step_samples()


def test_start_that_fails_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM cannot start: no such option"):
        Vllm(tmp_path / "a", FAKE_VLLM_FAILURE="no such option")
    config = VllmConfig(
        python=str(tmp_path / "nothing"),
        base_model=MODEL,
        folder=read_model_folder(write_folder(tmp_path / "model")),
    )
    with pytest.raises(ConfigError, match="cannot be run: No such file"):
        VllmEngine(config)
    (tmp_path / "false").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "false").chmod(0o755)
    started = process.VllmProcess(str(tmp_path / "false"), {})
    with pytest.raises(ConfigError, match="ended while it started"):
        started.load({})
    started.close()


def test_start_that_hangs_is_given_up_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "START_SECONDS", 0.2)
    monkeypatch.setattr(process, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.1)
    (tmp_path / "slow").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "slow").chmod(0o755)
    started = process.VllmProcess(str(tmp_path / "slow"), {})
    with caplog.at_level("INFO"), pytest.raises(ConfigError, match="did not start within"):
        started.load({})
    started.close()
    assert "vLLM is starting" in caplog.text
