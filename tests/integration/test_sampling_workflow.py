"""Sampling over HTTP: results, rejections and retries."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    PROMPT,
    SHORT,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    base_logprobs,
    datum,
    eventually,
)
from tinkex import (
    AdamParams,
    APIResponseValidationError,
    BadRequestError,
    InternalServerError,
    InvalidInput,
    ModelInput,
    RateLimitError,
    RequestFailedError,
    RetryConfig,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
)
from tinkex.testing import Fault, StubServer

ONCE = RetryConfig(enable_retry_logic=False)
QUICK = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)
LIMITED = Fault(status=429, headers={"retry-after-ms": "1"}, body={"detail": "slow down"})


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL, retry_config=QUICK)


def limiter_of(client: SamplingClient) -> Any:
    return client.holder.sampling_limits.limiter


def seq_ids(server: StubServer) -> list[int]:
    return [call.message["seq_id"] for call in server.calls("asample")]


# --- success ----------------------------------------------------------------------------------


def test_samples_have_tokens_logprobs_and_ids(server: StubServer, sampler: SamplingClient) -> None:
    response = sampler.sample(PROMPT, 3, SamplingParams(max_tokens=5, stop=[], seed=1)).result(
        TIMEOUT_SECONDS
    )
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        assert sequence.stop_reason == "length"
        assert len(sequence.tokens) == 5
        row = [PROMPT.to_ints()[-1], *sequence.tokens]
        np.testing.assert_allclose(sequence.logprobs, base_logprobs(row), rtol=1e-4)
    (call,) = server.calls("asample")
    assert call.headers["x-tinker-sampling-backpressure"] == "1"
    assert call.message["sampling_params"]["stop"] == []
    # Older servers reject unknown fields: unused new fields are not sent.
    assert not {"prompt_alt_tokens_k", "record_stability_info"} & call.message.keys()


def test_many_concurrent_samples_all_resolve(server: StubServer, sampler: SamplingClient) -> None:
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(50)]
    responses = [future.result(TIMEOUT_SECONDS) for future in futures]
    ids = {response.sequences[0].sequence_id for response in responses}
    assert len(ids) == 50
    assert sorted(seq_ids(server)) == list(range(50))
    assert sampler.metrics().operations["sample"].count == 50
    assert sampler.metrics().counters.get("retries", 0) == 0


def test_async_samples_run_concurrently(server: StubServer, connect: Connect) -> None:
    """All samples are submitted before the first result is available."""
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    pending = Fault(status=408, body={"queue_state": "active"}, delay_seconds=0.05)
    server.inject("retrieve_future", pending, times=None)

    async def sample_all() -> list[Any]:
        work = asyncio.gather(*(sampler.sample_async(PROMPT, 1, SHORT) for _ in range(20)))
        await asyncio.to_thread(server.wait_for, "asample", 20, TIMEOUT_SECONDS)
        server.clear_faults()
        return await asyncio.wait_for(work, TIMEOUT_SECONDS)

    assert len(asyncio.run(sample_all())) == 20


def test_trained_weights_can_be_sampled(service: ServiceClient) -> None:
    client = service.create_lora_training_client(BASE_MODEL)
    before = client.save_weights_and_get_sampling_client()
    for _ in range(20):
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.5))
    path = client.save_weights_for_sampler("trained").result(TIMEOUT_SECONDS).path
    named = service.create_sampling_client(model_path=path)
    unnamed = client.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(HELLO)
    scores = [
        sum(each.compute_logprobs(prompt).result(TIMEOUT_SECONDS)[1:]) for each in (named, unnamed)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    # A sampler keeps the weights it was created from.
    untrained = sum(before.compute_logprobs(prompt).result(TIMEOUT_SECONDS)[1:])
    assert untrained == pytest.approx(float(base_logprobs(HELLO).sum()), rel=1e-5)
    assert scores[0] > 0.5 * untrained
    assert named.get_base_model() == BASE_MODEL


# --- prompt logprobs --------------------------------------------------------------------------


def test_compute_logprobs(sampler: SamplingClient) -> None:
    prompt = ModelInput.from_ints(HELLO)
    logprobs = sampler.compute_logprobs(prompt).result(TIMEOUT_SECONDS)
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(base_logprobs(HELLO).tolist(), rel=1e-5)
    tail = asyncio.run(sampler.compute_logprobs_async(prompt, 3))
    assert tail[:-3] == [None] * (len(HELLO) - 3)
    assert tail[-3:] == pytest.approx(logprobs[-3:], rel=1e-6)


def test_topk_target_and_alternative_tokens(server: StubServer, sampler: SamplingClient) -> None:
    target = TensorData.from_numpy(np.array([[1, 2], [3, 4]], dtype=np.int64))
    prompt = ModelInput.from_ints([10, 20, 30])
    response = sampler.sample(
        prompt,
        1,
        SamplingParams(max_tokens=2, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=4,
    ).result(TIMEOUT_SECONDS)
    topk = response.topk_prompt_logprobs
    assert topk is not None
    assert [None if row is None else len(row) for row in topk] == [None, 2, 2]
    best_token, best_logprob = topk[1][0]  # type: ignore[index]
    assert best_logprob == pytest.approx(float(base_logprobs([10, best_token])[0]), rel=1e-5)
    assert response.target_prompt_logprobs is not None
    scored = response.target_prompt_logprobs.to_numpy()
    assert scored.shape == (2, 2)
    assert scored[1, 0] == pytest.approx(float(base_logprobs([20, 3])[0]), rel=1e-5)
    assert response.prompt_alt_tokens is not None
    assert list(response.prompt_alt_tokens.tokens.shape) == [2, 4]
    assert len(response.sequences[0].topk_logprobs or []) == 2
    message = server.calls("asample")[0].message
    assert message["target_prompt_logprobs"]["shape"] == [2, 2]
    assert message["prompt_alt_tokens_k"] == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_samples": 0}, "num_samples must be 1 or more, got 0"),
        ({"topk_prompt_logprobs": -1}, "-1"),
        ({"prompt_logprobs_last_n": 2}, "include_prompt_logprobs"),
        ({"prompt": [1, 2]}, "ModelInput"),
    ],
)
def test_invalid_requests_are_rejected_locally(
    server: StubServer, sampler: SamplingClient, options: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "num_samples": 1, "sampling_params": SHORT}
    with pytest.raises(InvalidInput, match=text):
        sampler.sample(**given | options)
    assert server.calls("asample") == []


# --- 429: shared back-off and resubmission ----------------------------------------------------


def test_429_is_resubmitted_with_same_seq_id(server: StubServer, sampler: SamplingClient) -> None:
    server.inject("asample", LIMITED)
    future = sampler.sample(PROMPT, 1, SHORT)
    server.wait_for("asample", 1)
    eventually(lambda: limiter_of(sampler).is_backing_off())
    assert not future.done()
    future.result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0, 0]
    # The success came after the back-off, so the next one is not delayed.
    assert not limiter_of(sampler).is_backing_off()


def test_429_holds_back_all_clients_of_same_key(
    server: StubServer, service: ServiceClient, sampler: SamplingClient
) -> None:
    once = service.create_sampling_client(base_model=BASE_MODEL, retry_config=ONCE)
    server.inject("asample", Fault(status=429, headers={"retry-after": "30"}))
    with pytest.raises(RateLimitError) as caught:
        once.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert caught.value.retry_after_seconds == 30.0
    assert limiter_of(sampler) is limiter_of(once)
    # The server's retry-after counts, not only the default of one second.
    assert 25.0 < limiter_of(sampler).remaining_seconds() <= 30.0
    held = sampler.sample(PROMPT, 1, SHORT)
    for _ in range(5):
        sampler.get_base_model()  # other requests are sent, samples wait
    assert len(server.calls("asample")) == 1
    assert held.cancel()


def test_shorter_429_does_not_shorten_backoff(server: StubServer, service: ServiceClient) -> None:
    """A back-off is never shortened."""
    once = service.create_sampling_client(base_model=BASE_MODEL, retry_config=ONCE)
    long, short = ({"retry-after": seconds} for seconds in ("20", "1"))
    # Both are sent before the first response, which has the longer wait.
    server.inject("asample", Fault(status=429, headers=long, delay_seconds=0.2))
    server.inject("asample", Fault(status=429, headers=short, delay_seconds=0.3))
    futures = [once.sample(PROMPT, 1, SHORT) for _ in range(2)]
    for future in futures:
        assert isinstance(future.exception(TIMEOUT_SECONDS), RateLimitError)
    assert limiter_of(once).remaining_seconds() > 15.0


# --- other error statuses ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 503])
def test_5xx_raises_without_retry_logic(
    server: StubServer, service: ServiceClient, status: int
) -> None:
    once = service.create_sampling_client(base_model=BASE_MODEL, retry_config=ONCE)
    server.inject("asample", Fault(status=status, body={"detail": "broken"}), times=None)
    with pytest.raises(InternalServerError, match="broken") as caught:
        once.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert caught.value.status_code == status
    assert len(server.calls("asample")) == 1


def test_5xx_is_retried_with_same_seq_id(server: StubServer, sampler: SamplingClient) -> None:
    server.inject("asample", Fault(status=500), times=3)
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0, 0, 0, 0]


def test_400_raises_immediately(server: StubServer, sampler: SamplingClient) -> None:
    server.inject("asample", Fault(status=400, body={"detail": "too long"}), times=None)
    with pytest.raises(BadRequestError, match="too long") as caught:
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert caught.value.is_user_error
    assert len(server.calls("asample")) == 1


def test_should_retry_header_decides_resubmission(
    server: StubServer, sampler: SamplingClient
) -> None:
    """x-should-retry also controls resubmission."""
    server.inject("asample", Fault(status=503, headers={"x-should-retry": "false"}), times=None)
    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert len(server.calls("asample")) == 1
    server.clear_faults()
    server.inject("asample", Fault(status=400, headers={"x-should-retry": "true"}))
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0, 1, 1]


def test_server_flag_disables_retries(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"sample_no_retries": True})
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL, retry_config=QUICK)
    server.inject("asample", Fault(status=500), times=None)
    with pytest.raises(InternalServerError):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert len(server.calls("asample")) == 1


def test_expired_future_is_resubmitted_with_new_seq_id(
    server: StubServer, sampler: SamplingClient
) -> None:
    server.inject("retrieve_future", Fault(status=410, body={"detail": "gone"}))
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0, 1]


def test_user_error_is_not_resubmitted(server: StubServer, sampler: SamplingClient) -> None:
    failure = {"error": "the weights are gone", "category": "user"}
    server.inject("retrieve_future", Fault(status=200, body=failure))
    with pytest.raises(RequestFailedError, match="weights are gone"):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0]


def test_server_error_is_resubmitted_a_few_times(
    server: StubServer, sampler: SamplingClient
) -> None:
    failed = Fault(status=200, body={"error": "out of memory", "category": "server"})
    server.inject("retrieve_future", failed, times=2)
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0, 1, 2]
    server.inject("retrieve_future", failed, times=None)
    with pytest.raises(RequestFailedError, match="out of memory"):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert len(seq_ids(server)) <= 3 + 4


def test_lost_response_samples_once(server: StubServer, sampler: SamplingClient) -> None:
    server.inject("asample", Fault(drop_after=True))
    response = sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    assert seq_ids(server) == [0, 0]
    [request_id] = {call.message["request_id"] for call in server.calls("retrieve_future")}
    assert response.sequences[0].sequence_id == f"{request_id}:0"


# --- invalid responses ------------------------------------------------------------------------


def test_missing_sequence_ids_are_derived(server: StubServer, sampler: SamplingClient) -> None:
    sampler.sample(PROMPT, 2, SHORT).result(TIMEOUT_SECONDS)
    request_id = server.calls("retrieve_future")[0].message["request_id"]
    server.inject("asample", Fault(status=200, body={"request_id": request_id}))
    response = sampler.sample(PROMPT, 2, SHORT).result(TIMEOUT_SECONDS)
    ids = [sequence.sequence_id for sequence in response.sequences]
    assert ids == [f"{request_id}:0", f"{request_id}:1"]


def test_wrong_number_of_sequences_is_typed_error(
    server: StubServer, sampler: SamplingClient
) -> None:
    """The official client uses assert here."""
    sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    request_id = server.calls("retrieve_future")[0].message["request_id"]
    promise = {"request_id": request_id, "sample_sequence_ids": ["a", "b"]}
    server.inject("asample", Fault(status=200, body=promise))
    with pytest.raises(APIResponseValidationError, match="announced 2 sequences but returned 1"):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
