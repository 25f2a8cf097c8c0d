"""The official SDK and a server that has too much to do: back-off, cancelling, nothing twice."""

from __future__ import annotations

from typing import Any

from tests.acceptance.server.rest_scenarios import admin_of, this_day, totals
from tests.acceptance.server.scenario_context import BASE_MODEL, HELLO, ScenarioContext, datum
from tests.acceptance.server.weights_scenarios import connect

PROMPT = [1, 2, 3]
NUM_TOKENS = 4


def used(place: ScenarioContext) -> dict[str, float]:
    """What the tenant has used in all."""
    return totals(admin_of(place).get_billing_usage(*this_day()).result().data)


def draw(sampler: Any) -> Any:
    """A sample that is on its way."""
    import tinker

    params = tinker.SamplingParams(max_tokens=NUM_TOKENS, stop=[])
    return sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params)


def wait_for_room(place: ScenarioContext) -> None:
    """More samples than may wait: the server says 429, the SDK comes again, each is drawn once."""
    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        waiting = [draw(sampler) for _ in range(14)]
        for each in waiting:
            assert len(each.result().sequences[0].tokens) == NUM_TOKENS
        assert used(place)["sampling_sample"] == 14 * NUM_TOKENS


def cancel_samples(place: ScenarioContext) -> None:
    """What nobody waits for any more is not drawn."""
    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        first, *rest = [draw(sampler) for _ in range(8)]
        # By then the others have been sent; before that, they could be forgotten in silence.
        first.result()
        cancelled = [each for each in rest if each.cancel()]
        assert cancelled
        # Samples are begun in order: when this one is over, those before it are too.
        draw(sampler).result()
        assert 2 * NUM_TOKENS <= used(place)["sampling_sample"] < 9 * NUM_TOKENS


def keep_many_steps_in_flight(place: ScenarioContext) -> None:
    """Work that is sent without waiting is done in the order in which it was sent."""
    import tinker

    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        passes, steps = [], []
        for _ in range(3):
            passes.append(client.forward_backward([datum(tinker, HELLO)], "cross_entropy"))
            steps.append(client.optim_step(tinker.AdamParams(learning_rate=0.2)))
        losses = [each.result().metrics["loss:sum"] for each in passes]
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
        assert [each.result().metrics["step"] for each in steps] == [1.0, 2.0, 3.0]


SCENARIOS = (wait_for_room, cancel_samples, keep_many_steps_in_flight)
