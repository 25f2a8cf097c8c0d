"""The result of a request does not depend on what else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling_runner import (
    adapter,
    answer,
    answered,
    answers,
    new_runner,
    prompt_of,
    request,
    shared_host,
    tokens_of,
)
from tinkex.engine.protocol import EngineFailure
from tinkex.engine.sampling.request_state import SamplerAdapter
from tinkex.nn.lora_layout import LoraLayout, TargetKind
from tinkex.types import SampleRequest, SampleResponse

_ADAPTERS = st.sampled_from([None, 1, 2, 3])


@dataclass(frozen=True)
class _ConcurrentRequest:
    """A request, when it arrives, and when it is cancelled if ever."""

    arrives: int
    cancelled: int | None
    seed: int | None
    asked: SampleRequest

    @property
    def adapter_of_request(self) -> SamplerAdapter | None:
        return adapter(self.seed) if self.seed is not None else None


_concurrent_requests = st.builds(
    lambda arrives, stays, seed, length, kind, num, tokens, temperature: _ConcurrentRequest(
        arrives,
        arrives + stays if stays is not None else None,
        seed,
        request(
            prompt_of(length, kind),
            num,
            max_tokens=tokens,
            temperature=temperature,
            seed=length,
            top_k=5 if kind else -1,
        ),
    ),
    st.integers(0, 30),
    st.none() | st.integers(0, 20),
    _ADAPTERS,
    st.integers(1, 90),
    st.integers(0, 1),
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.7, 1.0]),
)
_MINE = {
    "short": request(prompt_of(6), 2, max_tokens=40, seed=11),
    "long": request(prompt_of(75), 5, max_tokens=40, seed=12, temperature=0.8, top_p=0.9),
}


def _alone(name: str, seed: int | None) -> SampleResponse:
    adapter_of_request = adapter(seed) if seed is not None else None
    return answer(new_runner(), _MINE[name], adapter_of_request)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(_MINE)),
    _ADAPTERS,
    st.integers(0, 10),
    st.lists(_concurrent_requests, max_size=6),
)
def test_tokens_are_independent_of_batch(
    name: str, seed: int | None, arrives: int, concurrent_requests: list[_ConcurrentRequest]
) -> None:
    # Little memory and few sequences, so that requests wait and sequences are preempted.
    runner = new_runner(cache_bytes=1 << 20, max_sequences=12)
    mine = _ConcurrentRequest(arrives, None, seed, _MINE[name])
    found: dict[str, SampleResponse | EngineFailure] = {}
    time = 0
    requests = {str(index): concurrent for index, concurrent in enumerate(concurrent_requests)} | {
        "mine": mine
    }
    while time < 45 or len(runner):
        for job_id, concurrent in requests.items():
            if concurrent.arrives == time:
                runner.add(job_id, concurrent.adapter_of_request, concurrent.asked)
            if concurrent.cancelled == time:
                runner.cancel(job_id)
        found.update(runner.step())
        time += 1
    assert tokens_of(answered(found["mine"])) == tokens_of(_alone(name, seed))
    for job_id, concurrent in requests.items():
        assert job_id in found or concurrent.cancelled is not None


def _spoiled(host_seed: int) -> SamplerAdapter:
    layout = LoraLayout(shared_host().lora_targets, 4, set(TargetKind))
    flat = layout.init_weights(host_seed).fill_(float("nan"))
    return SamplerAdapter("spoiled", 1.0, layout.views(flat))


def test_non_finite_weights_fail_only_their_request() -> None:
    mine = request(prompt_of(8), 3, max_tokens=30, seed=1)
    runner = new_runner()
    runner.add("mine", adapter(1), mine)
    runner.add("other", adapter(2), mine)
    runner.add("bad", _spoiled(0), request(prompt_of(9), 2, max_tokens=30))
    found: dict[str, SampleResponse | EngineFailure] = {}
    while len(runner):
        found.update(runner.step())
    bad = found["bad"]
    assert isinstance(bad, EngineFailure)
    assert "NaN or infinite" in bad.message
    assert tokens_of(answered(found["mine"])) == tokens_of(answer(new_runner(), mine, adapter(1)))
    # A slot that held non-finite values can be reused.
    again = answers(runner, dict.fromkeys("abc", (None, mine)))
    assert all(tokens_of(one) == tokens_of(answer(new_runner(), mine)) for one in again.values())


def test_deterministic_mode_is_batch_invariant() -> None:
    mine = request(prompt_of(40), 6, max_tokens=30, seed=3)
    concurrent_requests = {
        str(n): (adapter(n), request(prompt_of(40 + n), 3, max_tokens=9)) for n in (1, 2)
    }
    alone = answer(new_runner(is_deterministic=True), mine)
    runner = new_runner(is_deterministic=True)
    together = answers(runner, {**concurrent_requests, "mine": (None, mine)})["mine"]
    for one, other in zip(alone.sequences, together.sequences, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
    again = answers(runner, {"again": (None, mine)})["again"]
    assert again.prompt_cache_hit_tokens == 0
    assert [one.logprobs for one in again.sequences] == [one.logprobs for one in alone.sequences]


def test_seeded_samples_are_reproducible() -> None:
    asked = request(prompt_of(5), 4, max_tokens=20, seed=9)
    first = tokens_of(answer(new_runner(), asked))
    assert len({tuple(one) for one in first}) == 4, "samples of a request differ"
    fewer = tokens_of(answer(new_runner(), request(prompt_of(5), 2, max_tokens=20, seed=9)))
    assert fewer == first[:2], "sample j depends only on the seed and j"
    free = request(prompt_of(5), max_tokens=20)
    assert tokens_of(answer(new_runner(), free)) != tokens_of(answer(new_runner(), free))


def test_gradient_mode_is_preserved() -> None:
    answer(new_runner(), request(prompt_of(4)))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
