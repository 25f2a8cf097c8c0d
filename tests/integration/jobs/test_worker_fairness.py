"""Training and sampling share the engine's time; tenants do not share prefix caches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import FinishedSample, GeneratorPassRun, Pass, SamplerSource
from tinkex.types import SampleRequest

PASS_SECONDS, STEP_SECONDS, NUM_STEPS = 0.2, 0.01, 30


class SlowEngine(FakeEngine):
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


def test_sample_runs_many_steps_after_long_pass(harness: WorkerHarness) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    run_id = harness.model(tenant, session)
    passes = [harness.forward_backward(run_id, 1 + index, [5, 6, 7]) for index in range(20)]
    sample = harness.sample(harness.sampler(tenant, session), 1)
    engine = SlowEngine()
    harness.start(engine)
    harness.result(sample)
    harness.result(passes[0])
    steps_between_passes = "".join(event[0] for event in engine.order).strip("p").split("p")
    # One step per pass would need as many passes as steps.
    assert len(steps_between_passes) < NUM_STEPS / 2


class ScopeRecordingEngine(FakeEngine):
    """Records the tenant scope of each sample."""

    def __init__(self) -> None:
        super().__init__([BASE_MODEL])
        self.scopes: list[str] = []

    def start_sample(self, job_id: str, source: SamplerSource, request: SampleRequest) -> None:
        self.scopes.append(source.tenant_id)
        super().start_sample(job_id, source, request)


def test_prefix_cache_is_tenant_scoped(harness: WorkerHarness) -> None:
    tenants = [harness.tenant("alice"), harness.tenant("bob")]
    engine = ScopeRecordingEngine()
    harness.start(engine)
    for tenant in tenants:
        harness.result(harness.sample(harness.sampler(tenant, harness.session(tenant)), 1))
    assert engine.scopes == tenants
