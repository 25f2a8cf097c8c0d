"""The official SDK with an overloaded server: backoff, cancellation, no duplicate work."""

from __future__ import annotations

from typing import Any

from tests.acceptance.server.rest_scenarios import admin_of, this_day, totals
from tests.acceptance.server.scenario_context import BASE_MODEL, HELLO, ScenarioContext, datum
from tests.acceptance.server.weights_scenarios import connect

PROMPT = [1, 2, 3]
NUM_TOKENS = 4


def used(place: ScenarioContext) -> dict[str, float]:
    """The total usage of the tenant."""
    return totals(admin_of(place).get_billing_usage(*this_day()).result().data)


def draw(sampler: Any) -> Any:
    """A submitted sample."""
    import tinker

    params = tinker.SamplingParams(max_tokens=NUM_TOKENS, stop=[])
    return sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params)


def wait_for_room(place: ScenarioContext) -> None:
    """Above the queue limit the server returns 429, the SDK retries, and each sample runs once."""
    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        waiting = [draw(sampler) for _ in range(14)]
        for each in waiting:
            assert len(each.result().sequences[0].tokens) == NUM_TOKENS
        assert used(place)["sampling_sample"] == 14 * NUM_TOKENS


def cancel_samples(place: ScenarioContext) -> None:
    """Cancelled samples are not run."""
    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        first, *rest = [draw(sampler) for _ in range(8)]
        # By then the others have been sent; before that, the SDK may drop them silently.
        first.result()
        cancelled = [each for each in rest if each.cancel()]
        assert cancelled
        # Samples start in order: when this one has finished, the earlier ones have too.
        draw(sampler).result()
        assert 2 * NUM_TOKENS <= used(place)["sampling_sample"] < 9 * NUM_TOKENS


def keep_many_steps_in_flight(place: ScenarioContext) -> None:
    """Operations submitted without waiting run in submission order."""
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
