"""A step whose gradient is not finite is refused, and its gradient is gone for good."""

from __future__ import annotations

from collections.abc import Mapping

from tests.integration.jobs.conftest import BASE_MODEL, House
from tinkex.engine.fake.engine import FakeEngine
from tinkex.engine.protocol import StepRefused, WriteSnapshot
from tinkex.types import AdamParams
from tinkex.types.optimizers import OptimParams
from tinkex.wire.proto import decode_forward_backward_output

BAD, GOOD = [5, 6, 7, 8], [9, 10, 11, 12]
REFUSED_RATE = 0.5


class Strict(FakeEngine):
    """Refuses steps of one learning rate, and cannot write its state, so that it is replayed."""

    def optim_step(self, adapter_id: str, params: OptimParams) -> Mapping[str, float]:
        if isinstance(params, AdamParams) and params.learning_rate == REFUSED_RATE:
            _, trainer = self._get_adapter(adapter_id)
            trainer.gradient_VV = None
            raise StepRefused("the gradient is not finite")
        return super().optim_step(adapter_id, params)

    def snapshot(self, adapter_id: str) -> WriteSnapshot:
        raise OSError("no room")


def test_a_refused_step_drops_its_gradient_now_and_when_it_is_replayed(house: House) -> None:
    tenant = house.tenant()
    session = house.session(tenant)
    plain, refused = house.model(tenant, session, 0), house.model(tenant, session, 1)
    house.start(Strict([BASE_MODEL]))
    house.forward_backward(plain, 1, GOOD)
    house.result(house.optim_step(plain, 2))
    house.forward_backward(refused, 1, BAD)
    told = house.outcome(house.optim_step(refused, 2, REFUSED_RATE))
    assert told.job.error == "the gradient is not finite"
    house.forward_backward(refused, 3, GOOD)
    house.result(house.optim_step(refused, 4))

    def losses(plain_seq: int, refused_seq: int) -> list[float]:
        passes = [
            house.forward_backward(plain, plain_seq, BAD),
            house.forward_backward(refused, refused_seq, BAD),
        ]
        results = [decode_forward_backward_output(house.result(one)) for one in passes]
        return [one.metrics["loss:sum"] for one in results]

    before = losses(3, 5)
    assert before[0] == before[1]
    house.stop()
    house.start(Strict([BASE_MODEL]))
    assert losses(4, 6) == before
