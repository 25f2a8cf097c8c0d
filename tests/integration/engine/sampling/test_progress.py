"""Partial results of the PyTorch engine: offsets are right whatever happens to a sequence."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.sampling_runner import adapter, new_runner, prompt_of, request
from tests.support.stream_reader import CollectedTokens
from tinkex.engine.protocol import SampleProgress
from tinkex.engine.sampling import continuous_batching
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.engine.sampling.request_state import RequestState, SequenceState
from tinkex.jobs.streamed_tokens import StreamedTokens
from tinkex.types import SampleResponse

#: What one token of the tiny model takes: two layers, keys and values, two heads of 16 floats.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
MAX_STEPS = 3000


def run_watched(
    runner: ContinuousBatcher, job_ids: Iterable[str]
) -> tuple[dict[str, list[SampleProgress]], dict[str, SampleResponse]]:
    """Run all requests; return the progress of some, and the responses."""
    progress: dict[str, list[SampleProgress]] = {job_id: [] for job_id in job_ids}
    responses: dict[str, SampleResponse] = {}
    for job_id in progress:
        runner.watched.watch(job_id)
    for _ in range(MAX_STEPS):
        if not len(runner):
            return progress, responses
        responses.update({k: v for k, v in runner.step() if isinstance(v, SampleResponse)})
        for each in runner.watched.take_progress():
            progress[each.job_id].append(each)
    raise AssertionError("the requests did not finish")


def assert_streamed(parts: list[SampleProgress], response: SampleResponse) -> None:
    """The parts are consecutive, and with the rest they are the response."""
    collected, received = CollectedTokens(), StreamedTokens("job")
    received.start(None, 0)
    received.start("worker", 1)
    for part in parts:
        assert received.accept("worker", part) == part, "nothing is repeated or missing"
    collected.add([*parts, *received.rest(response.sequences)])
    collected.assert_equals(response)
    rows = [row for part in parts if part.sequence == 0 for row in part.topk]
    assert rows == (response.sequences[0].topk_logprobs or [])[: len(rows)]


@pytest.fixture
def one_pass_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous_batching, "STEP_SECONDS", 0.0)


@pytest.mark.usefixtures("one_pass_per_step")
def test_every_token_is_reported_when_it_is_sampled() -> None:
    runner = new_runner()
    runner.add("a", adapter(1), request(prompt_of(20), 3, max_tokens=12, topk_sample_logprobs=2))
    runner.add("b", None, request(prompt_of(30), max_tokens=12))
    progress, responses = run_watched(runner, ["a"])
    assert_streamed(progress["a"], responses["a"])
    # All sequences share the prefill; the tokens of the last step are in the response.
    assert len(progress["a"]) == 3 * 11
    assert all(len(part.tokens) == 1 for part in progress["a"])
    assert len(progress["a"][0].topk) == 1
    assert not runner.watched


def test_the_first_token_ends_a_step() -> None:
    runner = new_runner()
    runner.add("a", None, request(prompt_of(20), max_tokens=40))
    runner.watched.watch("a")
    for _ in range(MAX_STEPS):
        runner.step()
        progress = runner.watched.take_progress()
        if progress:
            break
    assert [(part.offset, len(part.tokens)) for part in progress] == [(0, 1)]


@pytest.mark.usefixtures("one_pass_per_step")
def test_preempted_sequences_keep_their_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner(cache_bytes=700 * TOKEN_BYTES)
    for n in range(3):
        runner.add(str(n), None, request(prompt_of(30, n), max_tokens=200, seed=n))
    preempted = set()
    preempt = RequestState.preempt

    def record(state: RequestState, sequence: SequenceState) -> None:
        preempted.add(state.job_id)
        preempt(state, sequence)

    monkeypatch.setattr(RequestState, "preempt", record)
    progress, responses = run_watched(runner, ["0", "1", "2"])
    assert preempted
    for job_id, parts in progress.items():
        assert_streamed(parts, responses[job_id])


@pytest.mark.usefixtures("one_pass_per_step")
def test_lost_memory_does_not_repeat_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner()
    runner.add("kept", None, request(prompt_of(20), 2, max_tokens=30, seed=1))
    runner.add("failed", None, request(prompt_of(25), max_tokens=30, seed=2))
    runner.watched.watch("kept")
    parts = []
    for _ in range(10):
        runner.step()
        parts += runner.watched.take_progress()
    run_step = ContinuousBatcher._run_step

    def fail_once(batcher: ContinuousBatcher, *, is_light: bool) -> None:
        monkeypatch.setattr(ContinuousBatcher, "_run_step", run_step)
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(ContinuousBatcher, "_run_step", fail_once)
    progress, responses = run_watched(runner, ["kept"])
    assert set(responses) == {"kept"}
    # Watched again, so that everything was reported again.
    assert progress["kept"][0].tokens[:9] == tuple(part.tokens[0] for part in parts[::2])[:9]
    assert_streamed(progress["kept"], responses["kept"])


@pytest.mark.usefixtures("one_pass_per_step")
def test_a_late_watcher_gets_everything_and_a_cancelled_request_nothing() -> None:
    runner = new_runner()
    runner.add("a", None, request(prompt_of(20), max_tokens=30))
    runner.add("gone", None, request(prompt_of(20), max_tokens=30))
    for _ in range(8):
        runner.step()
    assert runner.watched.take_progress() == []
    runner.watched.watch("a")
    runner.watched.watch("gone")
    runner.watched.watch("unknown")
    num_sampled = runner.cancel("gone")
    (first,) = runner.watched.take_progress()
    assert (first.job_id, first.offset) == ("a", 0)
    # Of equal prompts, the second waits for the prefill of the first.
    assert len(first.tokens) == num_sampled + 1 > 4
    runner.step()
    assert [part.offset for part in runner.watched.take_progress()] == [len(first.tokens)]
    runner.watched.watch("a")
    (again,) = runner.watched.take_progress()
    assert again.tokens[: len(first.tokens)] == first.tokens
    runner.watched.unwatch("a")
    runner.step()
    assert runner.watched.take_progress() == []
