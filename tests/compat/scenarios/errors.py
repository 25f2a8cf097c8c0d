"""What a mistake looks like: the SDK's own class of error, with a sentence of the server."""

from __future__ import annotations

import tinker
from tinker import types

from tests.compat.scenarios.context import (
    RANK,
    ScenarioContext,
    datum,
    fields_of,
    refusal,
    scenario,
    step,
)

ERRORS = "Errors"
#: A failed request: at once by its status, or later by its future.
REFUSED = (
    tinker.BadRequestError,
    tinker.UnprocessableEntityError,
    tinker.RequestFailedError,
)


@scenario(ERRORS, "a path that does not exist")
def missing_path(ctx: ScenarioContext) -> None:
    path = "tinker://no-such-run/weights/none"
    errors = (tinker.NotFoundError, *REFUSED)
    text = refusal(lambda: ctx.service.create_training_client_from_state(path), *errors)
    assert "no-such-run" in text, text


@scenario(ERRORS, "a wrong key")
def wrong_key(ctx: ScenarioContext) -> None:
    service = tinker.ServiceClient  # the constructor of some versions connects at once

    def connect() -> None:
        service(base_url=ctx.url, api_key="tml-wrong").get_server_capabilities()

    text = refusal(connect, tinker.AuthenticationError)
    assert "key" in text, text


@scenario(ERRORS, "a base model that is not served")
def unknown_model(ctx: ScenarioContext) -> None:
    def create() -> None:
        client = ctx.service.create_lora_training_client(base_model="no/such-model", rank=RANK)
        client.get_info()

    text = refusal(create, tinker.NotFoundError, *REFUSED)
    assert "no/such-model" in text, text


@scenario(ERRORS, "a prompt that is too long")
def oversized_prompt(ctx: ScenarioContext) -> None:
    prompt = types.ModelInput.from_ints([5] * 5000)
    params = types.SamplingParams(max_tokens=1)

    def ask() -> None:
        ctx.sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()

    text = refusal(ask, *REFUSED)
    assert "5000" in text or "2048" in text, text


@scenario(ERRORS, "a token outside the vocabulary")
def unknown_token(ctx: ScenarioContext) -> None:
    example = datum([5, 99_999, 6])
    text = refusal(
        lambda: ctx.client.forward_backward([example], "cross_entropy").result(), *REFUSED
    )
    assert "99999" in text, text


@scenario(ERRORS, "a loss without the inputs that it needs")
def missing_inputs(ctx: ScenarioContext) -> None:
    text = refusal(lambda: ctx.client.forward_backward([datum()], "ppo").result(), *REFUSED)
    assert "logprobs" in text, text


@scenario(ERRORS, "an image, for a model that reads text only")
def image(ctx: ScenarioContext) -> None:
    given = {"data": b"\x89PNG", "format": "png", "expected_tokens": 4}
    given |= {"height": 2, "width": 2, "tokens": 4}
    known = fields_of(types.ImageChunk)
    chunk = types.ImageChunk(**{name: value for name, value in given.items() if name in known})
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5, 6]), chunk])
    params = types.SamplingParams(max_tokens=1)
    text = refusal(
        lambda: ctx.sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result(),
        *REFUSED,
    )
    assert "image" in text.lower(), text


@scenario(ERRORS, "the client works on after a refused request")
def works_on(ctx: ScenarioContext) -> None:
    client = ctx.service.create_lora_training_client(base_model=ctx.base_model, rank=RANK)
    refusal(lambda: client.forward_backward([datum()], "ppo").result(), *REFUSED)
    assert step(client) > 0
