"""KV cache memory: limits, sharing, preemption, release and the prefix cache."""

from __future__ import annotations

import pytest
import torch

from tests.support.sampling_runner import (
    adapter,
    answer,
    answered,
    answers,
    drain,
    failure,
    new_runner,
    prompt_of,
    request,
    shared_host,
    tokens_of,
)
from tinkex.engine.protocol import EngineFailure
from tinkex.engine.sampling import scheduler
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.errors import RequestErrorCategory
from tinkex.nn.kv_cache import PromptKV

#: What one token of the tiny model takes: two layers, keys and values, two heads of 16 floats.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


def _live_bytes(runner: ContinuousBatcher) -> int:
    """Reserved memory that cannot be evicted."""
    return runner._kv_manager.busy_bytes


def test_full_kv_cache_queues_requests() -> None:
    jobs = {str(n): (None, request(prompt_of(20 + n), max_tokens=100, seed=n)) for n in range(12)}
    wanted = {name: tokens_of(one) for name, one in answers(new_runner(), jobs).items()}
    runner = new_runner(cache_bytes=500 * TOKEN_BYTES)
    for job_id, (_, asked) in jobs.items():
        runner.add(job_id, None, asked)
    found, most = {}, 0
    while len(runner):
        found.update(runner.step())
        assert runner.used_bytes <= 500 * TOKEN_BYTES
        most = max(most, len(runner._kv_manager))
    assert {name: tokens_of(answered(one)) for name, one in found.items()} == wanted
    assert 1 < most < 12, "some ran together, and some had to wait"


def test_newest_sequence_is_preempted_when_kv_cache_grows() -> None:
    asked = {str(n): request(prompt_of(30, n), max_tokens=200, seed=n) for n in range(3)}
    runner = new_runner(cache_bytes=700 * TOKEN_BYTES)
    for job_id, one in asked.items():
        runner.add(job_id, None, one)
    paused, order = set(), []
    while len(runner):
        paused |= {case.job_id for case in runner._queue.values() if case.preempted}
        for job_id, outcome in runner.step():
            order.append(job_id)
            assert tokens_of(answered(outcome)) == tokens_of(answer(new_runner(), asked[job_id]))
    assert "2" in paused
    assert "0" not in paused, "the oldest is never preempted"
    assert order[0] == "0"


def test_preempted_requests_do_not_take_the_memory_of_each_other() -> None:
    # Two preempted sequences fit, but not together with the slot of one.
    asked = {str(n): request(prompt_of(30, n), max_tokens=200, seed=n) for n in range(3)}
    runner = new_runner(cache_bytes=500 * TOKEN_BYTES)
    for job_id, one in asked.items():
        runner.add(job_id, None, one)
    found = {job_id: one for _ in range(2000) for job_id, one in runner.step()}
    assert {job_id: tokens_of(answered(one)) for job_id, one in found.items()} == {
        job_id: tokens_of(answer(new_runner(), one)) for job_id, one in asked.items()
    }


def test_request_larger_than_kv_cache_is_rejected() -> None:
    runner = new_runner(cache_bytes=100 * TOKEN_BYTES)
    bad = failure(runner, request(prompt_of(60), max_tokens=60))
    assert bad.category is RequestErrorCategory.User
    assert f"{(120 + 128) * TOKEN_BYTES} bytes" in bad.message
    assert len(tokens_of(answer(runner, request(prompt_of(20), max_tokens=12)))[0]) == 12


@pytest.mark.parametrize("num_samples", [1, 6])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 12])
def test_cancel_frees_all_memory(num_samples: int, num_steps: int) -> None:
    runner = new_runner(pass_tokens=40)
    runner.add("gone", adapter(1), request(prompt_of(150), num_samples, max_tokens=300))
    for _ in range(num_steps):
        runner.step()
    runner.cancel("gone")
    assert len(runner) == 0
    assert runner.step() == []
    runner._kv_manager._free_empty_arenas()
    assert _live_bytes(runner) == 0
    runner.cancel("gone")
    runner.clear()
    assert runner.used_bytes == 0


def test_resubmitted_job_id_restarts() -> None:
    runner = new_runner()
    runner.add("same", None, request(prompt_of(5), max_tokens=300))
    runner.step()
    found = answers(runner, {"same": (None, request(prompt_of(6), max_tokens=3, seed=1))})
    assert tokens_of(found["same"]) == tokens_of(
        answer(new_runner(), request(prompt_of(6), max_tokens=3, seed=1))
    )


def test_excess_sequences_start_as_slots_free_up() -> None:
    asked = request(prompt_of(70), 23, max_tokens=9, seed=2)
    runner = new_runner(max_sequences=5)
    runner.add("many", None, asked)
    found = {}
    while len(runner):
        found.update(runner.step())
        assert len(runner._kv_manager) <= 5
    assert tokens_of(answered(found["many"])) == tokens_of(answer(new_runner(), asked))


def test_sequences_share_their_prompt() -> None:
    runner = new_runner()
    runner.add("many", None, request(prompt_of(300), 16, max_tokens=200))
    while not runner._kv_manager.slot_groups:
        runner.step()
    prompt_bytes = 300 * TOKEN_BYTES
    assert runner.used_bytes <= prompt_bytes + 16 * 128 * TOKEN_BYTES


def test_prefix_cache_hit_skips_prefill() -> None:
    runner = new_runner()
    whose = adapter(1)
    first = request(prompt_of(90), 2, max_tokens=20, seed=1)
    longer = request(prompt_of(90) + prompt_of(25, 9), 2, max_tokens=20, seed=1)
    shorter = request(prompt_of(90)[:50], 2, max_tokens=20, seed=1)
    hits = {}
    for name, asked in {"first": first, "again": first, "on": longer, "part": shorter}.items():
        found = answer(runner, asked, whose)
        hits[name] = found.prompt_cache_hit_tokens
        assert tokens_of(found) == tokens_of(answer(new_runner(), asked, whose)), name
    assert hits == {"first": 0, "again": 90, "on": 90, "part": 49}
    assert answer(runner, first, adapter(2)).prompt_cache_hit_tokens == 0, "other weights"
    assert answer(runner, first).prompt_cache_hit_tokens == 0


def test_concurrent_equal_prompts_share_prefill() -> None:
    runner = new_runner()
    asked = request(prompt_of(100), max_tokens=5)
    found = answers(runner, {str(n): (None, asked) for n in range(5)})
    assert sorted(one.prompt_cache_hit_tokens for one in found.values()) == [0, 100, 100, 100, 100]


def test_cached_prefixes_are_evicted_first() -> None:
    runner = new_runner(cache_bytes=1000 * TOKEN_BYTES)
    for number in range(20):
        answer(runner, request(prompt_of(200, number), max_tokens=1))
        assert runner.used_bytes <= 1000 * TOKEN_BYTES
    assert answer(runner, request(prompt_of(200, 19), max_tokens=1)).prompt_cache_hit_tokens == 200
    assert answer(runner, request(prompt_of(200, 0), max_tokens=1)).prompt_cache_hit_tokens == 0


@torch.inference_mode()
def test_long_prefill_does_not_block_decode() -> None:
    runner = new_runner()
    runner.add("running", None, request(prompt_of(5), max_tokens=400))
    runner._iterate()
    runner.add("long", None, request(prompt_of(400), max_tokens=1))
    case = runner._queue["running"]
    (sequence,) = case.running
    before, num_turns = len(sequence.tokens), 0
    while "long" in runner._queue:
        runner._iterate()
        num_turns += 1
    assert num_turns == -(-400 // scheduler.PREFILL_TOKENS_WITH_DECODE)
    assert len(sequence.tokens) - before == num_turns, "every pass has the next token of all"


def test_prompt_out_of_memory_fails_only_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner()
    runner.add("mine", None, request(prompt_of(5), max_tokens=30, seed=1))
    runner.step()
    build = PromptKV.__init__

    def fail(self: PromptKV, kind: object, num_tokens: int) -> None:
        if num_tokens == 50:
            raise RuntimeError("not enough memory")
        build(self, kind, num_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptKV, "__init__", fail)
    runner.add("large", None, request(prompt_of(50)))
    runner.add("next", None, request(prompt_of(5), max_tokens=30, seed=1))
    found = drain(runner)
    large = found["large"]
    assert isinstance(large, EngineFailure)
    assert "not enough memory" in large.message
    assert large.category is RequestErrorCategory.Server
    assert tokens_of(answered(found["mine"])) == tokens_of(answered(found["next"]))


def test_batcher_counts_unfinished_requests() -> None:
    runner = new_runner(max_sequences=9)
    assert len(runner) == 0
    runner.add("good", None, request(prompt_of(5)))
    runner.add("bad", None, request([]))
    assert len(runner) == 2
    assert set(drain(runner)) == {"good", "bad"}
    assert shared_host().num_layers == 2
