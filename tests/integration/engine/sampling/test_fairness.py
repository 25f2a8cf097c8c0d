"""A light tenant is served promptly beside a bulk tenant, with the same results."""

from __future__ import annotations

import pytest

from tests.support.sampling_runner import answer, new_runner, prompt_of, request
from tinkex.engine.protocol import EngineFailure, FinishedSample
from tinkex.engine.sampling import continuous_batching as runner_module
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher

LOUD, QUIET = "loud", "quiet"


@pytest.fixture(autouse=True)
def one_iteration_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit every step to one iteration."""
    monkeypatch.setattr(runner_module, "STEP_SECONDS", 0.0)


def submit_many(runner: ContinuousBatcher, num: int, max_tokens: int = 100) -> None:
    for index in range(num):
        asked = request(prompt_of(5, index), max_tokens=max_tokens, seed=index)
        runner.add(f"loud-{index}", None, asked, tenant_id=LOUD)


def num_running(runner: ContinuousBatcher, tenant_id: str) -> int:
    return sum(len(case.running) for case in runner._queue.values() if case.tenant_id == tenant_id)


def steps_until(runner: ContinuousBatcher, job_id: str, limit: int) -> tuple[int, FinishedSample]:
    for num_steps in range(1, limit + 1):
        for over in runner.step():
            if over.job_id == job_id:
                return num_steps, over
    raise AssertionError(f"{job_id} did not finish within {limit} steps")


def test_new_tenant_starts_when_all_slots_are_taken() -> None:
    runner = new_runner(max_sequences=8)
    submit_many(runner, 20)
    while num_running(runner, LOUD) < 8:
        runner.step()
    asked = request(prompt_of(6, 3), max_tokens=4, seed=7)
    runner.add("mine", None, asked, tenant_id=QUIET)
    num_steps, over = steps_until(runner, "mine", 20)
    # The first step is its prefill, and some steps in between are for all tenants.
    assert num_steps <= 12
    assert num_running(runner, LOUD) == 8
    alone = answer(new_runner(), asked)
    assert not isinstance(over.outcome, EngineFailure)
    assert over.outcome.sequences[0].tokens == alone.sequences[0].tokens


def test_light_steps_leave_other_sequences_unchanged() -> None:
    busy, idle_runner = new_runner(max_sequences=8), new_runner(max_sequences=8)
    for runner in (busy, idle_runner):
        submit_many(runner, 8, max_tokens=30)
    while num_running(busy, LOUD) < 8:
        busy.step()
    lights = []
    plain = busy._light_steps.record_step

    def note(seconds: float, *, is_light: bool, is_mixed: bool) -> None:
        lights.append(is_light)
        plain(seconds, is_light=is_light, is_mixed=is_mixed)

    busy._light_steps.record_step = note  # type: ignore[method-assign]
    busy.add("mine", None, request(prompt_of(6, 3), max_tokens=20, seed=7), tenant_id=QUIET)
    found, wanted = ({}, {})  # type: dict[str, list[int]], dict[str, list[int]]
    for runner, results in ((busy, found), (idle_runner, wanted)):
        while len(runner):
            for over in runner.step():
                assert not isinstance(over.outcome, EngineFailure)
                results[over.job_id] = list(over.outcome.sequences[0].tokens)
    assert any(lights)
    assert len(found.pop("mine")) == 20
    assert found == wanted


def test_single_tenant_has_no_light_steps() -> None:
    runner = new_runner(max_sequences=8)
    submit_many(runner, 12, max_tokens=10)
    lights, plain = [], runner._light_steps.record_step

    def note(seconds: float, *, is_light: bool, is_mixed: bool) -> None:
        lights.append(is_light)
        plain(seconds, is_light=is_light, is_mixed=is_mixed)

    runner._light_steps.record_step = note  # type: ignore[method-assign]
    while len(runner):
        runner.step()
    assert lights
    assert not any(lights)


def test_deterministic_requests_are_round_robin() -> None:
    runner = new_runner(is_deterministic=True)
    submit_many(runner, 6, max_tokens=3)
    runner.step()
    runner.add("mine", None, request(prompt_of(4), max_tokens=3), tenant_id=QUIET)
    order = []
    while len(runner):
        order += [over.job_id for over in runner.step()]
    assert order.index("mine") == 1
