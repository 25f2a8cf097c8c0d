"""Scenarios of the official SamplingClient: samples, log-probs, seeds, stops, clones."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import numpy as np

from tests.acceptance.server.scenario_context import (
    BASE_MODEL,
    HELLO,
    ScenarioContext,
    base_logprobs,
    base_table,
    datum,
    loss_of,
    step,
)

PROMPT = [10, 20, 30, 40]
ABSENT = "tinker://no-such-run/sampler_weights/best"


def connect(place: ScenarioContext, **options: Any) -> Any:
    import tinker

    return tinker.ServiceClient(base_url=place.url, api_key=place.key, **options)


def draw(sampler: Any, num_samples: int = 1, **params: Any) -> list[list[int]]:
    """The tokens of each sequence."""
    import tinker

    prompt = tinker.ModelInput.from_ints(PROMPT)
    asked = tinker.SamplingParams(**{"max_tokens": 12, **params})
    response = sampler.sample(prompt, num_samples, asked).result()
    return [list(sequence.tokens) for sequence in response.sequences]


def scores(sampler: Any, tokens: list[int] = HELLO) -> list[float]:
    """The log-probs of all tokens but the first."""
    import tinker

    logprobs = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    assert logprobs[0] is None and len(logprobs) == len(tokens)
    return list(logprobs[1:])


def draw_from_the_base(place: ScenarioContext) -> None:
    import tinker

    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        assert sampler.get_base_model() == BASE_MODEL
        assert sampler.get_telemetry() is not None
        once, again = (draw(sampler, 3, seed=7, stop=[]) for _ in range(2))
        assert once == again, "a seed repeats"
        assert [len(tokens) for tokens in once] == [12, 12, 12]
        assert once[0] != once[1] != once[2], "the samples of one request differ"
        assert draw(sampler, seed=8, stop=[]) != draw(sampler, seed=7, stop=[])
        assert draw(sampler, stop=[]) != draw(sampler, stop=[]), "without a seed nothing repeats"
        greedy = [int(base_table()[PROMPT[-1]].argmax())]
        while len(greedy) < 12:
            greedy.append(int(base_table()[greedy[-1]].argmax()))
        assert draw(sampler, temperature=0.0, stop=[]) == [greedy]
        assert draw(sampler, top_k=1, stop=[]) == [greedy]
        assert draw(sampler, top_p=1e-6, stop=[]) == [greedy]

        prompt = tinker.ModelInput.from_ints(PROMPT)
        params = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
        response = sampler.sample(prompt, 2, params).result()
        ids = {sequence.sequence_id for sequence in response.sequences}
        assert len(ids) == 2 and all(ids)
        for sequence in response.sequences:
            assert sequence.stop_reason == "length"
            expected = base_logprobs([PROMPT[-1], *sequence.tokens])
            assert np.allclose(sequence.logprobs, expected, atol=1e-5)
        service.create_sampling_client(base_model=BASE_MODEL, record_stability_info=True)


def stop_where_asked(place: ScenarioContext) -> None:
    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        [whole] = draw(sampler, seed=5, stop=[], max_tokens=40)
        [cut] = draw(sampler, seed=5, stop=[whole[3]], max_tokens=40)
        assert cut == whole[: whole.index(whole[3]) + 1]
        letters = [token for token in whole if token < 128]
        [cut] = draw(sampler, seed=5, stop=[chr(letters[0])], max_tokens=40)
        assert cut == whole[: whole.index(letters[0]) + 1]
        [cut] = draw(sampler, seed=5, stop=chr(letters[-1]), max_tokens=40)
        assert cut[-1] == letters[-1]


def ask_about_the_prompt(place: ScenarioContext) -> None:
    import tinker

    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = tinker.SamplingParams(max_tokens=3, seed=1, stop=[])
    with connect(place) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        response = sampler.sample(
            prompt,
            1,
            params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=tinker.TensorData(
                data=[20, -1, 30, 7, 40, 1], dtype="int64", shape=[3, 2]
            ),
            prompt_alt_tokens_k=5,
        ).result()
        assert response.prompt_logprobs[0] is None
        assert np.allclose(response.prompt_logprobs[1:], base_logprobs(PROMPT), atol=1e-6)
        assert response.topk_prompt_logprobs[0] is None
        for previous, row in zip(PROMPT, response.topk_prompt_logprobs[1:], strict=False):
            best = np.argsort(-base_table()[previous])[:2]
            assert [token for token, _ in row] == best.tolist()
            assert np.allclose([score for _, score in row], base_table()[previous][best], atol=1e-6)
        asked = response.target_prompt_logprobs.tolist()
        assert asked[0][1] == 0.0, "-1 asks for nothing"
        assert math.isclose(asked[2][1], base_table()[30][1], rel_tol=1e-5)
        assert response.prompt_alt_tokens.tokens.shape == [3, 5]
        drawn = response.prompt_alt_tokens.tokens.to_numpy()
        expected = base_table()[np.array(PROMPT[:-1])[:, None], drawn]
        assert np.allclose(response.prompt_alt_tokens.logprobs.to_numpy(), expected, atol=1e-5)
        [sequence] = response.sequences
        assert [len(row) for row in sequence.topk_logprobs] == [3, 3, 3]

        last = sampler.sample(
            prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2
        ).result()
        assert [score is None for score in last.prompt_logprobs] == [True, True, False, False]
        assert np.allclose(scores(sampler), base_logprobs(HELLO), atol=1e-6)
        tail = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=1).result()
        assert tail[:3] == [None] * 3
        assert math.isclose(tail[3], base_logprobs(PROMPT)[-1], rel_tol=1e-5)


def sample_async(place: ScenarioContext) -> None:
    asyncio.run(_sample_async(place))


async def _sample_async(place: ScenarioContext) -> None:
    import tinker

    service = connect(place)
    sampler = await service.create_sampling_client_async(base_model=BASE_MODEL)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = tinker.SamplingParams(max_tokens=5, seed=9, stop=[])
    one = await sampler.sample_async(prompt, 1, params)
    two = await sampler.sample_async(prompt, 1, params)
    assert list(one.sequences[0].tokens) == list(two.sequences[0].tokens)
    many = await asyncio.gather(*[sampler.sample_async(prompt, 1, params) for _ in range(50)])
    assert {tuple(each.sequences[0].tokens) for each in many} == {tuple(one.sequences[0].tokens)}
    logprobs = await sampler.compute_logprobs_async(prompt)
    assert np.allclose(logprobs[1:], base_logprobs(PROMPT), atol=1e-6)
    assert await sampler.get_base_model_async() == BASE_MODEL
    await service.close("success")


def sample_what_was_trained(place: ScenarioContext) -> None:
    """A sampler keeps the weights of its creation and agrees with the trainer."""
    import tinker

    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        step(tinker, client)
        path = client.save_weights_for_sampler("early", user_metadata={"step": "1"}).result().path
        assert path == f"tinker://{client.model_id}/sampler_weights/early"
        early = client.save_weights_and_get_sampling_client()
        before = loss_of(tinker, client)
        for _ in range(5):
            step(tinker, client)
        late = client.save_weights_and_get_sampling_client()
        assert math.isclose(-sum(scores(early)), before, rel_tol=1e-5), "it did not learn on"
        assert math.isclose(-sum(scores(late)), loss_of(tinker, client), rel_tol=1e-5)
        assert sum(scores(late)) > sum(scores(early)) > base_logprobs(HELLO).sum()
        named = [
            client.create_sampling_client(path),
            service.create_sampling_client(model_path=path),
            tinker.SamplingClient.create(service.holder, model_path=path).result(),
        ]
        for sampler in named:
            assert scores(sampler) == scores(early)
            assert sampler.get_base_model() == BASE_MODEL
        state = client.save_state("late").result().path
        assert scores(service.create_sampling_client(model_path=state)) == scores(late)
        asyncio.run(_sample_what_was_trained_async(client, path, scores(late)))
        listed = tinker.RestClient(base_url=place.url, api_key=place.key)
        names = [each.checkpoint_id for each in listed.list_user_checkpoints().result().checkpoints]
        assert sorted(names) == ["sampler_weights/early", "sampler_weights/later", "weights/late"]


async def _sample_what_was_trained_async(client: Any, path: str, late: list[float]) -> None:
    import tinker

    prompt = tinker.ModelInput.from_ints(HELLO)
    early = await client.create_sampling_client_async(path)
    sampler = await client.save_weights_and_get_sampling_client_async()
    saved = await (await client.save_weights_for_sampler_async("later"))
    assert saved.path.endswith("/sampler_weights/later")
    assert (await sampler.compute_logprobs_async(prompt))[1:] == late
    assert (await early.compute_logprobs_async(prompt))[1:] != late


def clone_samplers(place: ScenarioContext) -> None:
    import tinker
    from tinker.lib.api_future_impl import QueueState

    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        step(tinker, client)
        sampler = client.save_weights_and_get_sampling_client()
        handle = sampler.get_sampler_handle()
        assert place.key not in handle
        clones = [
            tinker.SamplingClient.from_sampler_handle(handle, api_key=place.key),
            tinker.SamplingClient.from_sampler_handle(handle, api_key=place.key),
            pickle.loads(pickle.dumps(sampler)),
        ]
        for clone in clones:
            assert draw(clone, seed=4) == draw(sampler, seed=4)
            assert scores(clone) == scores(sampler)
        stranger = tinker.SamplingClient.from_sampler_handle(handle, api_key=place.other_key)
        try:
            draw(stranger)
        except tinker.NotFoundError:
            pass
        else:
            raise AssertionError("a stranger sampled with another's handle")
        sampler.on_queue_state_change(QueueState.ACTIVE, None)


def refuse_bad_samples(place: ScenarioContext) -> None:
    import tinker

    short = tinker.SamplingParams(max_tokens=1)
    with connect(place) as service:
        for source in ({"model_path": ABSENT}, {"base_model": "no/such-model"}):
            try:
                service.create_sampling_client(**source)
            except (tinker.NotFoundError, tinker.BadRequestError) as error:
                assert "no" in str(error)
            else:
                raise AssertionError(f"{source} was sampled from")
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        for prompt, word in (([5, 99_999], "99999"), ([], "empty"), ([1] * 40_000, "40000")):
            try:
                sampler.sample(tinker.ModelInput.from_ints(prompt), 1, short).result()
            except tinker.UnprocessableEntityError as error:
                assert word in str(error) and error.body["category"] == "user", error
            else:
                raise AssertionError(f"{prompt[:5]} was sampled from")
        assert draw(sampler, seed=1) == draw(sampler, seed=1), "the client is none the worse"


def sample_in_a_session_that_ended(place: ScenarioContext) -> None:
    """A closed session rejects requests of all handles."""
    import tinker

    service = connect(place)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    clone = tinker.SamplingClient.from_sampler_handle(
        sampler.get_sampler_handle(), api_key=place.key
    )
    assert len(draw(clone)) == 1
    service.close("success").result()
    try:
        draw(clone)
    except tinker.APIStatusError as error:
        assert error.status_code in {400, 410}, error
        assert "finished" in str(error) or "over" in str(error), error
    else:
        raise AssertionError("a session that is over was sampled in")


def train_on_samples(place: ScenarioContext) -> None:
    """On-policy: log-probs of the sampler and the trainer agree."""
    import tinker

    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        step(tinker, client)
        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=8, seed=2, stop=[])
        prompt = tinker.ModelInput.from_ints(PROMPT)
        [sequence] = sampler.sample(prompt, 1, params).result().sequences
        tokens = [PROMPT[-1], *sequence.tokens]
        example = datum(
            tinker, tokens, logprobs=list(sequence.logprobs), advantages=[1.0] * (len(tokens) - 1)
        )
        output = client.forward_backward([example], "importance_sampling").result()
        trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert np.allclose(trained, sequence.logprobs, atol=1e-5)
        assert math.isclose(output.metrics["loss:sum"], -8.0, rel_tol=1e-4)


SCENARIOS = (
    draw_from_the_base,
    stop_where_asked,
    ask_about_the_prompt,
    sample_async,
    sample_what_was_trained,
    clone_samplers,
    refuse_bad_samples,
    sample_in_a_session_that_ended,
    train_on_samples,
)
