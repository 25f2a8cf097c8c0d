"""Failures of one request do not affect the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.sampling_runner import (
    EOS,
    answer,
    answered,
    drain,
    failure,
    new_runner,
    prompt_of,
    request,
    tokens_of,
)
from tinkex.engine.protocol import EngineFailure
from tinkex.engine.sampling import admission, kv_manager
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.engine.sampling.request import ModelLimits, parse_sample_request
from tinkex.engine.sampling.scheduler import MIN_SHARED_GROUP, shared_group_sizes
from tinkex.engine.sampling.stop_conditions import StopTextMatcher
from tinkex.engine.sampling.token_sampler import SampledTokens
from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.types import SampleResponse

#: What one token of the tiny model takes: two layers, keys and values, two heads of 16 floats.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
FULL = "can't allocate memory"
MAX_STEPS = 3000


class _Decoder:
    """Decodes each token to a letter, but fails for some."""

    def __init__(self, *unreadable: int) -> None:
        self._unreadable = set(unreadable)

    def decode(self, token_ids: Sequence[int], /) -> str:
        if self._unreadable & set(token_ids):
            raise KeyError("no such token")
        return "".join(chr(1000 + token) for token in token_ids)


class _Bytes:
    """Decodes each token to a few bytes of a text."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: Sequence[int], /) -> str:
        return b"".join(self._pieces[token] for token in token_ids).decode(errors="replace")


def _break(
    monkeypatch: pytest.MonkeyPatch, runner: ContinuousBatcher, name: str, error: Exception, at: int
) -> None:
    """Make one call of a ModelRunner method fail."""
    real, calls = getattr(runner._model_runner, name), count(1)

    def run(*given: object) -> Tensor:
        found: Tensor = real(*given)
        if next(calls) == at:
            raise error
        return found

    monkeypatch.setattr(runner._model_runner, name, run)


def _failed(outcome: SampleResponse | EngineFailure) -> EngineFailure:
    assert isinstance(outcome, EngineFailure)
    assert outcome.category is RequestErrorCategory.Server
    return outcome


def _some_steps(runner: ContinuousBatcher) -> dict[str, SampleResponse | EngineFailure]:
    """Run until all requests are finished, with a limit."""
    found: dict[str, SampleResponse | EngineFailure] = {}
    for _ in range(MAX_STEPS):
        found.update(runner.step())
        if not len(runner):
            return found
    raise AssertionError(f"{len(runner)} requests are still there")


# --- groups ---------------------------------------------------------------------------------------
def test_shared_group_sizes_are_halved() -> None:
    assert list(shared_group_sizes(64, 100)) == [64, 32, 16, 8, 4]
    assert list(shared_group_sizes(5, 100)) == [5, MIN_SHARED_GROUP]
    assert list(shared_group_sizes(3, 100)) == list(shared_group_sizes(64, 10)) == []


@pytest.mark.parametrize("num_tokens", [2000, 700, 420])
def test_large_group_is_sampled_in_parts(num_tokens: int) -> None:
    asked = request(prompt_of(100), 24, max_tokens=60, seed=1)
    runner = new_runner(cache_bytes=num_tokens * TOKEN_BYTES)
    runner.add("big", None, asked)
    runner.add("small", None, request(prompt_of(8), max_tokens=3))
    found = _some_steps(runner)
    assert tokens_of(answered(found["big"])) == tokens_of(answer(new_runner(), asked))
    answered(found["small"])


# --- passes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["run", "logits"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_out_of_memory_fails_newest_request(
    monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    asked = {str(n): request(prompt_of(20 + n), 2, max_tokens=9, seed=n) for n in range(3)}
    runner = new_runner()
    for job_id, one in asked.items():
        runner.add(job_id, None, one)
    _break(monkeypatch, runner, name, RuntimeError(FULL), at)
    found = drain(runner)
    assert "not enough memory" in _failed(found.pop("2")).message
    wanted = {job_id: tokens_of(answer(new_runner(), asked[job_id])) for job_id in found}
    assert {job_id: tokens_of(answered(one)) for job_id, one in found.items()} == wanted


def test_out_of_memory_fails_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner()

    def run(*_: object) -> Tensor:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(runner._model_runner, "run", run)
    for job_id in "ab":
        runner.add(job_id, None, request(prompt_of(20, ord(job_id))))
    assert [job_id for job_id, one in drain(runner).items() if _failed(one)] == ["b", "a"]
    assert runner.used_bytes == 0


@pytest.mark.parametrize("at", [1, 4])
def test_failed_pass_fails_only_active_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    runner = new_runner(max_sequences=2)
    for job_id in "abc":
        runner.add(job_id, None, request(prompt_of(20, ord(job_id)), seed=1))
    _break(monkeypatch, runner, "run", ValueError("boom"), at)
    found = drain(runner)
    assert "log" in _failed(found["a"]).message
    _failed(found["b"])
    assert len(caplog.records) == 1
    again = request(prompt_of(20, ord("c")), seed=1)
    assert tokens_of(answered(found["c"])) == tokens_of(answer(runner, again))


# --- prefill --------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["x", "ax", "xa", "axb"])
def test_prompt_scores_out_of_memory_fails_that_request(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(admission, "PromptLogprobs", refuse)
    runner = new_runner()
    for job_id in order:
        runner.add(job_id, None, request(prompt_of(20), prompt_logprobs=job_id == "x"))
    found = drain(runner)
    assert "not enough memory for the prompt" in _failed(found.pop("x")).message
    assert sorted(found) == sorted(set(order) - {"x"})
    assert all(answered(one) for one in found.values())
    runner.clear()
    assert runner.used_bytes == 0


def test_failed_allocation_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner()
    memory = runner._kv_manager

    def refuse(*_: object) -> None:
        raise RuntimeError(FULL)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=FULL):
        patch.setattr(kv_manager, "KVBlock", refuse)
        memory._resize_arena(64, 2, is_bulk=False)
    assert memory.used_bytes == 0
    group = memory._resize_arena(64, 2, is_bulk=False)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=FULL):
        patch.setattr(group, "resize", refuse)
        memory._resize_arena(64, 4, is_bulk=False)
    assert memory.used_bytes == 2 * 64 * TOKEN_BYTES


# --- text, top-k, tenants -------------------------------------------------------------------------
def test_tokenizer_error_fails_only_that_request() -> None:
    plain = {n: request(prompt_of(9, n), temperature=0.0, max_tokens=6) for n in range(2)}
    bad = tokens_of(answer(new_runner(), plain[0]))[0][2]
    assert bad not in tokens_of(answer(new_runner(), plain[1]))[0]
    runner = new_runner(texts=_Decoder(bad))
    for n in range(2):
        watched = request(prompt_of(9, n), temperature=0.0, max_tokens=6, stop=["never"])
        runner.add(str(n), None, watched)
    found = drain(runner)
    assert f"token {bad}" in _failed(found["0"]).message
    assert tokens_of(answered(found["1"])) == tokens_of(answer(new_runner(), plain[1]))


class _Shrinking:
    """Its text becomes shorter with the second token."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "ab " if token_ids[-1] == 1 else "ab"


def test_decoded_text_may_become_shorter() -> None:
    matcher = StopTextMatcher(_Shrinking(), ["zz"])
    assert not matcher.matches_after(1)
    assert not matcher.matches_after(2)


def test_split_character_after_invalid_bytes() -> None:
    pieces = [b"\xe2", b"\x82", b"\xac\xf0\x9f", b"\x98", b"\x80"]
    matcher = StopTextMatcher(_Bytes(pieces), ["\u20ac\U0001f600"])
    assert [matcher.matches_after(number) for number in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize(
    "name", ["topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"]
)
def test_too_large_topk_is_rejected(name: str) -> None:
    bad = failure(new_runner(), request(prompt_of(9), **{name: 212}))
    assert bad.message == f"{name} is 212; expected at most 211"
    large = ModelLimits(vocab_size=1000, max_context_tokens=99, eos_tokens=EOS, has_tokenizer=False)
    parse_sample_request(request(prompt_of(9), **{name: 256}), large)
    with pytest.raises(InvalidInput, match=f"{name} is 257; expected at most 256"):
        parse_sample_request(request(prompt_of(9), **{name: 257}), large)


def test_topk_rows_are_copies() -> None:
    chosen = SampledTokens([1], [0.0], np.zeros((9, 200), np.int32), np.zeros((9, 200), np.float32))
    row = chosen.topk_for_row(0, 1)
    assert row is not None
    assert [part.base for part in row] == [None, None]


def test_prefix_cache_is_per_tenant() -> None:
    runner, hits = new_runner(), {}
    for job_id, tenant_id in {"a1": "a", "b1": "b", "a2": "a", "none": ""}.items():
        runner.add(job_id, None, request(prompt_of(40), max_tokens=1), tenant_id=tenant_id)
        hits[job_id] = answered(drain(runner)[job_id]).prompt_cache_hit_tokens
    assert hits == {"a1": 0, "b1": 0, "a2": 40, "none": 0}


def test_pending_prefixes_are_per_tenant() -> None:
    runner = new_runner()
    for tenant_id in "ab":
        runner.add(tenant_id, None, request(prompt_of(40), max_tokens=1), tenant_id=tenant_id)
    assert [answered(one).prompt_cache_hit_tokens for one in drain(runner).values()] == [0, 0]
