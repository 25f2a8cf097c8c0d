"""The official SDK with tokens, compression and batched polling."""

from __future__ import annotations

import json
import math
import urllib.request
from typing import Any

from tests.acceptance.server.scenario_context import (
    BASE_MODEL,
    ScenarioContext,
    base_logprobs,
    datum,
    loss_of,
    step,
)
from tests.acceptance.server.weights_scenarios import connect, rest_of

PROMPT = [1, 2, 3]


def tell_who_is_there(place: ScenarioContext) -> None:
    import tinker

    who = rest_of(place).whoami().result()
    other = rest_of(place, place.other_key).whoami().result()
    assert who.user_urn and who.user_urn != other.user_urn
    assert who.org_urn.startswith("tml:organization:")
    with connect(place) as service:
        holder = service.holder
        assert holder.get_client_config().pjwt_auth_enabled
        # A token authenticates by itself and names its tenant.
        token = exchange(place)
        assert token.startswith("eyJ")
        assert rest_of(place, token).list_sessions().result().sessions == [holder.get_session_id()]
    try:
        rest_of(place, place.key + "x").list_sessions().result()
    except tinker.AuthenticationError as error:
        assert place.key not in str(error)
    else:
        raise AssertionError("a wrong key opened the server")


def exchange(place: ScenarioContext) -> str:
    """A token for a key."""
    headers = {"X-API-Key": place.key, "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{place.url}/api/v1/auth/token", b"{}", headers)
    with urllib.request.urlopen(asked, timeout=30) as response:
        token: str = json.load(response)["jwt"]
    return token


def take_every_other_road(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        config = service.holder.get_client_config()
        assert config.proto_compress_fwdbwd and config.create_model_via_load_weights
        assert config.sample_use_retrieve_futures and config.sample_join_sampling_session
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        texts = [[index, index + 1, 7] for index in range(10)]
        data = [datum(tinker, text) for text in texts]
        output = client.forward_backward(data, "cross_entropy").result()
        expected = -sum(base_logprobs(text).sum() for text in texts)
        assert math.isclose(output.metrics["loss:sum"], expected, rel_tol=1e-6)
        assert len(output.loss_fn_outputs) == 10
        client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        step(tinker, client)
        path = client.save_state("state").result().path
        ahead = step(tinker, client)

        resumed = service.create_training_client_from_state_with_optimizer(path)
        assert resumed.model_id.endswith(":train:1")
        assert resumed.get_info().lora_rank == 8
        assert step(tinker, resumed) == ahead
        fresh = service.create_training_client_from_state(path, user_metadata={"how": "via load"})
        assert step(tinker, fresh)[1]["step"] == 1.0
        run = rest_of(place).get_training_run(fresh.model_id).result()
        assert run.user_metadata == {"how": "via load"}


def sample_over_the_poller(place: ScenarioContext) -> None:
    import tinker

    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = tinker.SamplingParams(max_tokens=4, seed=3, stop=[])
    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        step(tinker, client)
        sampler = client.save_weights_and_get_sampling_client()
        handle = sampler.get_sampler_handle()
        clones = [
            tinker.SamplingClient.from_sampler_handle(handle, api_key=place.key) for _ in range(2)
        ]
        waiting = [each.sample(prompt, 2, params) for each in (sampler, *clones) for _ in range(30)]
        drawn = {_tokens(response.result()) for response in waiting}
        assert len(drawn) == 1, "one seed, one answer, over whichever client"
        logprobs = sampler.compute_logprobs(prompt).result()
        loss = loss_of(tinker, client, PROMPT)
        assert math.isclose(-sum(logprobs[1:]), loss, rel_tol=1e-5)
        try:
            sampler.sample(tinker.ModelInput.from_ints([99_999]), 1, params).result()
        except tinker.UnprocessableEntityError as error:
            assert "99999" in str(error)
        else:
            raise AssertionError("a token was made up")
        assert _tokens(sampler.sample(prompt, 2, params).result()) in drawn


def _tokens(response: Any) -> tuple[tuple[int, ...], ...]:
    assert len({sequence.sequence_id for sequence in response.sequences}) == 2
    return tuple(tuple(sequence.tokens) for sequence in response.sequences)


SCENARIOS = (tell_who_is_there, take_every_other_road, sample_over_the_poller)
