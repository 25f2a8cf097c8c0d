"""An optimizer step with a non-finite gradient is refused and clears the gradient."""

from __future__ import annotations

from collections.abc import Mapping

from tests.integration.jobs.conftest import BASE_MODEL, WorkerHarness
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import StepRefused, WriteSnapshot
from tinkex.types import AdamParams
from tinkex.types.optimizers import OptimParams
from tinkex.wire.proto import decode_forward_backward_output

BAD, GOOD = [5, 6, 7, 8], [9, 10, 11, 12]
REFUSED_RATE = 0.5


class StepRefusingEngine(FakeEngine):
    """Refuses steps with one learning rate; snapshots fail, so that changes are replayed."""

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        if isinstance(params, AdamParams) and params.learning_rate == REFUSED_RATE:
            _, trainer = self._get_adapter(adapter_id)
            trainer.gradient_VV = None
            raise StepRefused("the gradient is not finite")
        return super().optim_step(adapter_id, params)

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        raise OSError("no space")


def test_rejected_optim_step_clears_gradient_also_on_replay(harness: WorkerHarness) -> None:
    tenant = harness.tenant()
    session = harness.session(tenant)
    plain, refused = harness.model(tenant, session, 0), harness.model(tenant, session, 1)
    harness.start(StepRefusingEngine([BASE_MODEL]))
    harness.forward_backward(plain, 1, GOOD)
    harness.result(harness.optim_step(plain, 2))
    harness.forward_backward(refused, 1, BAD)
    refused_outcome = harness.outcome(harness.optim_step(refused, 2, REFUSED_RATE))
    assert refused_outcome.job.error == "the gradient is not finite"
    harness.forward_backward(refused, 3, GOOD)
    harness.result(harness.optim_step(refused, 4))

    def losses(plain_seq: int, refused_seq: int) -> list[float]:
        passes = [
            harness.forward_backward(plain, plain_seq, BAD),
            harness.forward_backward(refused, refused_seq, BAD),
        ]
        results = [decode_forward_backward_output(harness.result(one)) for one in passes]
        return [one.metrics["loss:sum"] for one in results]

    before = losses(3, 5)
    assert before[0] == before[1]
    harness.stop()
    harness.start(StepRefusingEngine([BASE_MODEL]))
    assert losses(4, 6) == before
