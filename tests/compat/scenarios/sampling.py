"""Sampling: seeds, stops, log-probabilities, copies of a client, many requests at once."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

from tinker import types

from tests.compat.scenarios.context import (
    PROMPT,
    TOKENS,
    Absent,
    ScenarioContext,
    draw,
    ephemeral,
    loss_of,
    need,
    need_parameter,
    scenario,
)

SAMPLING = "Sampling"


@scenario(SAMPLING, "the base model, with `seed`")
def sample_base(ctx: ScenarioContext) -> None:
    once, again = (list(draw(ctx.sampler)[0].tokens) for _ in range(2))
    assert once == again and 0 < len(once) <= 8, (once, again)


@scenario(SAMPLING, "`num_samples` and `logprobs`")
def num_samples(ctx: ScenarioContext) -> None:
    sequences = draw(ctx.sampler, 3, temperature=1.0)
    assert len(sequences) == 3
    for sequence in sequences:
        assert len(sequence.logprobs) == len(sequence.tokens)
        assert all(score <= 0 for score in sequence.logprobs)


@scenario(SAMPLING, "`stop` by token and by text, `stop_reason`")
def stop(ctx: ScenarioContext) -> None:
    seed, free = next(
        (seed, tokens)
        for seed in range(50)
        if len(set(tokens := list(draw(ctx.sampler, seed=seed)[0].tokens))) > 3
    )
    [cut] = draw(ctx.sampler, seed=seed, stop=[free[2]])
    assert list(cut.tokens) == free[: free.index(free[2]) + 1], (free, cut)
    assert cut.stop_reason == "stop", cut
    [whole] = draw(ctx.sampler, seed=seed, stop=["no such text in the answer"])
    assert list(whole.tokens)[: len(free)] == free, (free, whole)


@scenario(SAMPLING, "`compute_logprobs`")
def compute_logprobs(ctx: ScenarioContext) -> None:
    sampler = ephemeral(ctx.client)
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert scores[0] is None and len(scores) == len(TOKENS)
    assert math.isclose(-sum(scores[1:]), loss_of(ctx.client), rel_tol=1e-3), "as the trainer says"


@scenario(SAMPLING, "`include_prompt_logprobs`, `topk_prompt_logprobs`")
def prompt_logprobs(ctx: ScenarioContext) -> None:
    response = ctx.sampler.sample(
        prompt=types.ModelInput.from_ints(PROMPT),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    assert [score is None for score in response.prompt_logprobs] == [True, False, False, False]
    top = response.topk_prompt_logprobs
    assert top[0] is None and [len(row) for row in top[1:]] == [3, 3, 3], top


@scenario(SAMPLING, "`topk_sample_logprobs`, `target_prompt_logprobs`, `prompt_alt_tokens_k`")
def more_logprobs(ctx: ScenarioContext) -> None:
    need_parameter(ctx.sampler.sample, "prompt_alt_tokens_k")
    response = ctx.sampler.sample(
        prompt=types.ModelInput.from_ints(PROMPT),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=1),
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1]),
        prompt_alt_tokens_k=2,
    ).result()
    assert {len(row) for row in response.sequences[0].topk_logprobs} == {2}
    assert list(response.prompt_alt_tokens.tokens.shape) == [3, 2]
    assert list(response.target_prompt_logprobs.shape) == [3, 1]


@scenario(SAMPLING, "`save_weights_for_sampler`, `create_sampling_client`")
def saved_weights(ctx: ScenarioContext) -> None:
    sampler = ctx.service.create_sampling_client(model_path=ctx.weights)
    assert draw(sampler)[0].tokens


@scenario(SAMPLING, "`save_weights_and_get_sampling_client`")
def ephemeral_weights(ctx: ScenarioContext) -> None:
    sampler = ephemeral(ctx.client)
    assert draw(sampler)[0].tokens


@scenario(SAMPLING, "`get_base_model`")
def get_base_model(ctx: ScenarioContext) -> None:
    assert need(ctx.sampler, "get_base_model")() == ctx.base_model


@scenario(SAMPLING, "`SamplingClient.get_tokenizer` without a network")
def sampler_tokenizer(ctx: ScenarioContext) -> None:
    found = need(ctx.sampler, "get_tokenizer")()
    assert found.decode(found.encode("What is 3 plus 4?")) == "What is 3 plus 4?"


@scenario(SAMPLING, "a pickled sampling client")
def pickled(ctx: ScenarioContext) -> None:
    if "__reduce__" not in vars(type(ctx.sampler)):
        raise Absent("SamplingClient.__reduce__")
    clone = pickle.loads(pickle.dumps(ctx.sampler))
    assert list(draw(clone)[0].tokens) == list(draw(ctx.sampler)[0].tokens)


@scenario(SAMPLING, "32 samples in parallel")
def parallel(ctx: ScenarioContext) -> None:
    prompt = types.ModelInput.from_ints(PROMPT)
    asked = [types.SamplingParams(max_tokens=4, seed=seed) for seed in range(32)]
    futures = [
        ctx.sampler.sample(prompt=prompt, num_samples=1, sampling_params=each) for each in asked
    ]
    found = [future.result().sequences[0].tokens for future in futures]
    assert len(found) == 32 and all(found)


@scenario(SAMPLING, "`sample_async`, `compute_logprobs_async`")
def sample_async(ctx: ScenarioContext) -> None:
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=4, seed=1)

    async def sample() -> list[Any]:
        tasks = [
            ctx.sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=params)
            for _ in range(4)
        ]
        scores = await ctx.sampler.compute_logprobs_async(prompt)
        assert scores[0] is None and len(scores) == len(PROMPT)
        return [list(each.sequences[0].tokens) for each in await asyncio.gather(*tasks)]

    found = asyncio.run(sample())
    assert all(tokens == found[0] for tokens in found), found
