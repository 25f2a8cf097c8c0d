"""Training and sampling share a busy engine by time; tenants share it without seeing each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.integration.jobs.conftest import BASE_MODEL, House
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import FinishedSample, GeneratorPassRun, Pass, SamplerSource
from tinkex.types import SampleRequest

PASS_SECONDS, STEP_SECONDS, NUM_STEPS = 0.2, 0.01, 30


class Slow(FakeEngine):
    """A pass takes as long as many steps of sampling, and a sample takes many steps."""

    def __init__(self) -> None:
        super().__init__([BASE_MODEL])
        self.order: list[str] = []

    def start_passes(self, passes: Sequence[Pass]) -> GeneratorPassRun:
        self.order.append("pass")
        time.sleep(PASS_SECONDS)
        return super().start_passes(passes)

    def step_samples(self) -> Sequence[FinishedSample]:
        self.order.append("step")
        time.sleep(STEP_SECONDS)
        return super().step_samples() if self.order.count("step") >= NUM_STEPS else []


def test_a_sample_goes_many_steps_after_a_long_pass(house: House) -> None:
    tenant = house.tenant()
    session = house.session(tenant)
    run_id = house.model(tenant, session)
    passes = [house.forward_backward(run_id, 1 + index, [5, 6, 7]) for index in range(20)]
    sample = house.sample(house.sampler(tenant, session), 1)
    engine = Slow()
    house.start(engine)
    house.result(sample)
    house.result(passes[0])
    steps_of_turns = "".join(word[0] for word in engine.order).strip("p").split("p")
    # One step per pass would need as many passes as steps.
    assert len(steps_of_turns) < NUM_STEPS / 2


class Watching(FakeEngine):
    """Notes whose prompts each request may be recognised in."""

    def __init__(self) -> None:
        super().__init__([BASE_MODEL])
        self.scopes: list[str] = []

    def start_sample(self, ticket: str, source: SamplerSource, request: SampleRequest) -> None:
        self.scopes.append(source.tenant_id)
        super().start_sample(ticket, source, request)


def test_prompts_are_recognised_within_a_tenant_alone(house: House) -> None:
    tenants = [house.tenant("alice"), house.tenant("bob")]
    engine = Watching()
    house.start(engine)
    for tenant in tenants:
        house.result(house.sample(house.sampler(tenant, house.session(tenant)), 1))
    assert engine.scopes == tenants
