"""Partial results of the fake engine."""

from __future__ import annotations

from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import SamplerSource
from tinkex.types import ModelInput, SampleRequest, SampleResponse, SamplingParams

MODEL = "tinkex/bigram"
SOURCE = SamplerSource(base_model=MODEL)


def new_request(max_tokens: int, num_samples: int = 1) -> SampleRequest:
    return SampleRequest(
        prompt=ModelInput.from_ints([1, 2]),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=1, stop=[]),
        num_samples=num_samples,
        topk_sample_logprobs=2,
    )


def test_samples_are_decoded_together_one_token_per_step() -> None:
    engine = FakeEngine([MODEL], seconds_per_token=1.0)
    engine.interrupt()
    engine.start_sample("a", SOURCE, new_request(4, 2))
    engine.start_sample("b", SOURCE, new_request(3))
    engine.watch_sample("a")
    engine.watch_sample("unknown")
    tokens: dict[int, list[int]] = {0: [], 1: []}
    finished = {}
    for step in range(4):
        finished.update(engine.step_samples())
        for part in engine.sample_progress():
            assert (part.job_id, part.offset) == ("a", step)
            assert len(part.topk) == len(part.logprobs) == len(part.tokens) == 1
            tokens[part.sequence] += part.tokens
        assert ("b" in finished) == (step >= 2)
    response = finished["a"]
    assert isinstance(response, SampleResponse)
    # The tokens of the last step are in the response only.
    assert tokens == {n: s.tokens[:3] for n, s in enumerate(response.sequences)}
    assert engine.num_samples == 0


def test_cancelled_samples_report_how_many_tokens_were_decoded() -> None:
    engine = FakeEngine([MODEL], seconds_per_token=1.0)
    engine.interrupt()
    engine.start_sample("a", SOURCE, new_request(10, 2))
    engine.watch_sample("a")
    for _ in range(3):
        engine.step_samples()
    assert engine.cancel_sample("a") == 6
    assert engine.cancel_sample("a") == 0
    assert engine.sample_progress() == []


def test_unwatched_samples_report_nothing() -> None:
    engine = FakeEngine([MODEL], seconds_per_token=1.0)
    engine.interrupt()
    engine.start_sample("a", SOURCE, new_request(10))
    engine.watch_sample("a")
    engine.unwatch_sample("a")
    engine.step_samples()
    assert engine.sample_progress() == []
    engine.watch_sample("a")
    engine.step_samples()
    (part,) = engine.sample_progress()
    assert (part.offset, len(part.tokens)) == (0, 2)
