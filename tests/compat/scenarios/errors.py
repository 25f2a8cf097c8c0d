"""What a mistake looks like: the SDK's own class of error, with a sentence of the server."""

from __future__ import annotations

import tinker
from tinker import types

from tests.compat.scenarios.context import RANK, Lab, datum, fields_of, refusal, scenario, step

ERRORS = "Errors"
#: A failed request: at once by its status, or later by its future.
REFUSED = (
    tinker.BadRequestError,
    tinker.UnprocessableEntityError,
    tinker.RequestFailedError,
)


@scenario(ERRORS, "a path that does not exist")
def missing_path(lab: Lab) -> None:
    path = "tinker://no-such-run/weights/none"
    errors = (tinker.NotFoundError, *REFUSED)
    text = refusal(lambda: lab.service.create_training_client_from_state(path), *errors)
    assert "no-such-run" in text, text


@scenario(ERRORS, "a wrong key")
def wrong_key(lab: Lab) -> None:
    service = tinker.ServiceClient  # the constructor of some versions connects at once

    def connect() -> None:
        service(base_url=lab.url, api_key="tml-wrong").get_server_capabilities()

    text = refusal(connect, tinker.AuthenticationError)
    assert "key" in text, text


@scenario(ERRORS, "a base model that is not served")
def unknown_model(lab: Lab) -> None:
    def create() -> None:
        client = lab.service.create_lora_training_client(base_model="no/such-model", rank=RANK)
        client.get_info()

    text = refusal(create, tinker.NotFoundError, *REFUSED)
    assert "no/such-model" in text, text


@scenario(ERRORS, "a prompt that is too long")
def oversized_prompt(lab: Lab) -> None:
    prompt = types.ModelInput.from_ints([5] * 5000)
    params = types.SamplingParams(max_tokens=1)

    def ask() -> None:
        lab.sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()

    text = refusal(ask, *REFUSED)
    assert "5000" in text or "2048" in text, text


@scenario(ERRORS, "a token outside the vocabulary")
def unknown_token(lab: Lab) -> None:
    example = datum([5, 99_999, 6])
    text = refusal(
        lambda: lab.client.forward_backward([example], "cross_entropy").result(), *REFUSED
    )
    assert "99999" in text, text


@scenario(ERRORS, "a loss without the inputs that it needs")
def missing_inputs(lab: Lab) -> None:
    text = refusal(lambda: lab.client.forward_backward([datum()], "ppo").result(), *REFUSED)
    assert "logprobs" in text, text


@scenario(ERRORS, "an image, for a model that reads text only")
def image(lab: Lab) -> None:
    given = {"data": b"\x89PNG", "format": "png", "expected_tokens": 4}
    given |= {"height": 2, "width": 2, "tokens": 4}
    known = fields_of(types.ImageChunk)
    chunk = types.ImageChunk(**{name: value for name, value in given.items() if name in known})
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5, 6]), chunk])
    params = types.SamplingParams(max_tokens=1)
    text = refusal(
        lambda: lab.sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result(),
        *REFUSED,
    )
    assert "image" in text.lower(), text


@scenario(ERRORS, "the client works on after a refused request")
def works_on(lab: Lab) -> None:
    client = lab.service.create_lora_training_client(base_model=lab.base_model, rank=RANK)
    refusal(lambda: client.forward_backward([datum()], "ppo").result(), *REFUSED)
    assert step(client) > 0
