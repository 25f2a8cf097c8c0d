"""Sampling through the fake engine: order, seeds, checkpoints and failures."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fake.conftest import BASE, datum, run, train
from tinkex.engine.fake import sample_queue
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import EngineFailure, FinishedSample, SamplerSource
from tinkex.errors import RequestErrorCategory
from tinkex.types import (
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)

ALONE = SamplerSource(base_model=BASE)
SHARED = FakeEngine()


def request(
    prompt: list[int] | None = None, asked: dict[str, Any] | None = None, **params: Any
) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3] if prompt is None else prompt),
        sampling_params=SamplingParams(**{"max_tokens": 8, "stop": [], **params}),
        **(asked or {}),
    )


def finish(engine: FakeEngine) -> list[FinishedSample]:
    finished: list[FinishedSample] = []
    while engine.num_samples:
        finished.extend(engine.step_samples())
    return finished


def sample(
    engine: FakeEngine, source: SamplerSource = ALONE, *args: Any, **kwargs: Any
) -> SampleResponse | EngineFailure:
    engine.start_sample("only", source, request(*args, **kwargs))
    [(job_id, outcome)] = finish(engine)
    assert job_id == "only"
    return outcome


def response(outcome: SampleResponse | EngineFailure) -> SampleResponse:
    assert isinstance(outcome, SampleResponse), outcome
    return outcome


@pytest.fixture
def saved(engine: FakeEngine, tmp_path: Path) -> SamplerSource:
    """A sampler checkpoint after some training."""
    train(engine, steps=3)
    return save(engine, tmp_path / "saved")


def save(engine: FakeEngine, directory: Path) -> SamplerSource:
    directory.mkdir()
    engine.save("a", directory, with_optimizer=False)
    return SamplerSource(base_model=BASE, directory=directory)


# --- samples -------------------------------------------------------------------------------------


def test_seeded_sample_is_batch_invariant(engine: FakeEngine, saved: SamplerSource) -> None:
    alone = sample(engine, saved, seed=5, asked={"num_samples": 3})
    engine.start_sample("other", ALONE, request(seed=5, temperature=0.5))
    engine.start_sample("mine", saved, request(seed=5, asked={"num_samples": 3}))
    engine.start_sample("third", saved, request([7, 3]))
    outcomes = dict(finish(engine))
    assert outcomes["mine"] == alone
    assert outcomes["other"] != alone
    again = sample(FakeEngine(), saved, seed=5, asked={"num_samples": 3})
    assert again == alone


def test_unseeded_samples_differ(engine: FakeEngine) -> None:
    draws = [response(sample(engine, max_tokens=32)).sequences[0].tokens for _ in range(3)]
    assert len({tuple(draw) for draw in draws}) == 3


def test_sampling_and_training_agree_on_logprobs(engine: FakeEngine, saved: SamplerSource) -> None:
    sampled = response(sample(engine, saved, seed=1)).sequences[0]
    path = [3, *sampled.tokens]
    output = run(engine, "a", [datum(path[:-1], path[1:])], is_forward_only=True)
    assert sampled.logprobs == output.loss_fn_outputs[0]["logprobs"].tolist()


def test_checkpoint_differs_from_base_model(engine: FakeEngine, saved: SamplerSource) -> None:
    asked = {"prompt_logprobs": True}
    base = response(sample(engine, asked=asked)).prompt_logprobs
    trained = response(sample(engine, saved, asked=asked)).prompt_logprobs
    assert base is not None
    assert trained is not None
    assert (trained[1] or 0.0) > (base[1] or 0.0) + 0.1


def test_all_prompt_scores_can_be_requested(engine: FakeEngine) -> None:
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2}
    answer = response(sample(engine, asked=asked))
    assert answer.prompt_logprobs is not None
    assert answer.topk_prompt_logprobs is not None
    assert answer.prompt_alt_tokens is not None
    scores = answer.prompt_logprobs_np
    assert scores is not None
    assert np.isfinite(scores[1:]).all()


# --- order ---------------------------------------------------------------------------------------


def test_first_come_first_served(engine: FakeEngine) -> None:
    job_ids = [str(number) for number in range(20)]
    for job_id in job_ids:
        engine.start_sample(job_id, ALONE, request())
    assert engine.num_samples == 20
    assert [job_id for job_id, _ in finish(engine)] == job_ids
    assert engine.step_samples() == []


def test_step_ends_after_its_time_limit(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_queue, "STEP_SECONDS", 0.0)
    engine.start_sample("long", ALONE, request(asked={"num_samples": 3}))
    engine.start_sample("next", ALONE, request())
    steps = [[job_id for job_id, _ in engine.step_samples()] for _ in range(6)]
    assert steps == [[], [], [], ["long"], [], ["next"]]


def test_started_request_can_be_cancelled(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_queue, "STEP_SECONDS", 0.0)
    for job_id in ("begun", "waiting", "cached"):
        engine.start_sample(job_id, ALONE, request(asked={"num_samples": 3}))
    engine.step_samples()
    engine.cancel_sample("begun")
    engine.cancel_sample("waiting")
    engine.cancel_sample("unknown")
    assert engine.num_samples == 1
    assert [job_id for job_id, _ in finish(engine)] == ["cached"]


def test_slow_engine_finishes_one_request_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: slept.append(seconds))
    engine = FakeEngine(seconds_per_op=0.5)
    assert engine.step_samples() == []
    for job_id in "ab":
        engine.start_sample(job_id, ALONE, request(asked={"num_samples": 3}))
    assert [job_id for job_id, _ in engine.step_samples()] == ["a"]
    assert [job_id for job_id, _ in engine.step_samples()] == ["b"]
    assert slept == [0.5, 0.5]


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 520), max_size=5),
    temperature=st.floats(0, 1e308),
    top_k=st.just(-1) | st.integers(1, 600),
    top_p=st.floats(0, 1, exclude_min=True),
    stop=st.none() | st.text(max_size=3) | st.lists(st.integers(0, 600), max_size=3),
    num_samples=st.integers(-1, 3),
    last_n=st.none() | st.integers(-1, 6),
)
def test_any_request_is_answered_or_rejected(
    prompt: list[int], num_samples: int, last_n: int | None, **params: Any
) -> None:
    asked = {"num_samples": num_samples, "prompt_logprobs": True, "prompt_logprobs_last_n": last_n}
    asked |= {"topk_sample_logprobs": 2, "prompt_alt_tokens_k": 1}
    outcome = sample(SHARED, ALONE, prompt, asked, seed=1, **params)
    if isinstance(outcome, SampleResponse):
        assert len(outcome.sequences) == num_samples
        for sequence in outcome.sequences:
            assert np.isfinite(sequence.logprobs or []).all()


# --- invalid requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (request([]), "the prompt is empty"),
        (request([1, 512]), "the prompt has token 512, outside the vocabulary of 512"),
        (request([1] * 32769), "the prompt has 32769 tokens; this model reads at most 32768"),
        (
            request([1] * 32768, max_tokens=1),
            "the prompt has 32768 tokens and max_tokens is 1; together they may be at most 32768",
        ),
        (request(asked={"num_samples": 0}), "num_samples is 0"),
        (request(asked={"num_samples": 1025}), "num_samples is 1025; expected at most 1024"),
        (request(asked={"topk_prompt_logprobs": 513}), "topk_prompt_logprobs is 513"),
        (request(asked={"topk_sample_logprobs": 513}), "topk_sample_logprobs is 513"),
        (request(asked={"prompt_alt_tokens_k": 513}), "prompt_alt_tokens_k is 513"),
        (request(stop=""), "stop has an empty string"),
        (
            SampleRequest(
                prompt=ModelInput(
                    chunks=[
                        EncodedTextChunk(tokens=[1]),
                        ImageChunk(data=b"png", format="png", expected_tokens=1),
                    ]
                ),
                sampling_params=SamplingParams(),
            ),
            "the prompt has a chunk of type 'image', but this model reads text only",
        ),
    ],
)
def test_invalid_request_does_not_affect_others(
    engine: FakeEngine, wrong: SampleRequest, reason: str
) -> None:
    engine.start_sample("bad", ALONE, wrong)
    engine.start_sample("good", ALONE, request())
    outcomes = dict(finish(engine))
    failure = outcomes["bad"]
    assert isinstance(failure, EngineFailure)
    assert reason in failure.message
    assert failure.category is RequestErrorCategory.User
    assert isinstance(outcomes["good"], SampleResponse)


def test_full_context_is_accepted(engine: FakeEngine) -> None:
    [sequence] = response(sample(engine, prompt=[1] * 32760, max_tokens=8)).sequences
    assert len(sequence.tokens) == 8


def test_missing_weights_are_a_failure(
    engine: FakeEngine, saved: SamplerSource, tmp_path: Path
) -> None:
    unknown = sample(engine, SamplerSource(base_model="unknown/none"))
    assert unknown == EngineFailure("base model 'unknown/none' is not one of tinkex/bigram")
    gone = SamplerSource(base_model=BASE, directory=tmp_path / "gone")
    assert sample(engine, gone) == EngineFailure("there are no saved weights in 'gone'")
    assert saved.directory is not None
    other = SamplerSource(base_model="other", directory=saved.directory)
    assert sample(FakeEngine((BASE, "other")), other) == EngineFailure(
        "the weights are of base model 'tinkex/bigram', not of 'other'"
    )


def test_damaged_weights_are_a_server_error(engine: FakeEngine, saved: SamplerSource) -> None:
    assert saved.directory is not None
    (saved.directory / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    failure = sample(engine, saved)
    assert isinstance(failure, EngineFailure)
    assert "saved/adapter_model.safetensors cannot be read" in failure.message
    assert failure.category is RequestErrorCategory.Server


# --- sampler cache ------------------------------------------------------------------------------


def test_replaced_checkpoint_is_reloaded(
    engine: FakeEngine, saved: SamplerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read_model = sample_queue.read_model

    def count(directory: Path, vocab_size: int) -> Any:
        reads.append(directory)
        return read_model(directory, vocab_size)

    monkeypatch.setattr(sample_queue, "read_model", count)
    first = sample(engine, saved, seed=1, max_tokens=64)
    assert sample(engine, saved, seed=1, max_tokens=64) == first
    assert len(reads) == 1
    assert saved.directory is not None
    shutil.rmtree(saved.directory)
    train(engine, steps=20)
    save(engine, saved.directory)
    assert sample(engine, saved, seed=1, max_tokens=64) != first
    assert len(reads) == 2


def test_sampler_cache_evicts_least_recently_used(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_queue, "MAX_SAMPLERS", 2)
    cache = sample_queue.FakeSamplerCache(engine._bases)
    one, two, three = (save(engine, tmp_path / name) for name in ("1", "2", "3"))
    cached = cache.get_or_load(one)
    evicted = cache.get_or_load(two)
    assert cache.get_or_load(one) is cached
    cache.get_or_load(three)
    assert len(cache) == 2
    assert cache.get_or_load(one) is cached
    assert cache.get_or_load(two) is not evicted
