"""Server features for samples: cancelling, batched polling, large results."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from typing import Any

import pytest

from tests.integration.conftest import BASE_MODEL, PROMPT, SHORT, TIMEOUT_SECONDS, Connect, Serve
from tinkex import (
    APIResponseValidationError,
    NotFoundError,
    RequestFailedError,
    RetryConfig,
    SamplingParams,
)
from tinkex.testing import Fault, StubServer

QUICK = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)
CAN_CANCEL = {"sample_cancel_enabled": True}
ONE_POLL = {"sample_use_retrieve_futures": True}
#: 40,000 tokens of 8 bytes each: a server announces a result of this size first.
LARGE = SamplingParams(max_tokens=5000, stop=[])


def polls(server: StubServer, kind: str = "Sample") -> list[Any]:
    return [
        call.message
        for call in server.calls("retrieve_future")
        if call.headers["x-tinker-request-type"] == kind
    ]


# --- cancelling -------------------------------------------------------------------------------


def test_cancel_is_sent_if_server_supports_it(serve: Serve, connect: Connect) -> None:
    server = serve(dynamic_config=CAN_CANCEL, work_seconds=60.0)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    future = sampler.sample(PROMPT, 1, SHORT)
    server.wait_for("retrieve_future")
    assert future.cancel()
    (call,) = server.wait_for("cancel_future")
    assert call.message == {"request_id": polls(server)[0]["request_id"]}
    with pytest.raises(CancelledError):
        future.result(TIMEOUT_SECONDS)


def test_cancelling_awaiting_task_is_sent_to_server(serve: Serve, connect: Connect) -> None:
    server = serve(dynamic_config=CAN_CANCEL, work_seconds=60.0)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)

    async def give_up() -> None:
        task = asyncio.create_task(sampler.sample_async(PROMPT, 1, SHORT))
        await asyncio.to_thread(server.wait_for, "retrieve_future")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    server.wait_for("cancel_future")


def test_cancel_during_submission_is_sent_to_server(serve: Serve, connect: Connect) -> None:
    server = serve(dynamic_config=CAN_CANCEL, work_seconds=60.0)
    server.inject("asample", Fault(delay_seconds=0.5), times=1)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    future = sampler.sample(PROMPT, 1, SHORT)
    server.wait_for("asample")
    assert future.cancel()
    server.wait_for("cancel_future")
    assert polls(server) == []
    assert len(server.calls("asample")) == 1


@pytest.mark.parametrize("flags", [{}, {"sample_cancel_enabled": False}])
def test_cancel_is_not_sent_if_unsupported(
    serve: Serve, connect: Connect, flags: dict[str, Any]
) -> None:
    server = serve(dynamic_config=flags, work_seconds=60.0)
    service = connect(server)
    future = service.create_sampling_client(base_model=BASE_MODEL).sample(PROMPT, 1, SHORT)
    server.wait_for("retrieve_future")
    assert future.cancel()
    server.wait_for("client_dynamic_config")
    service.health()
    assert server.calls("cancel_future") == []


def test_timeout_does_not_cancel_sample(serve: Serve, connect: Connect) -> None:
    server = serve(dynamic_config=CAN_CANCEL, work_seconds=2.0)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    future = sampler.sample(PROMPT, 1, SHORT)
    with pytest.raises(TimeoutError):
        future.result(0.05)

    async def wait_a_moment() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(0.05)

    asyncio.run(wait_a_moment())
    assert future.result(TIMEOUT_SECONDS).sequences
    assert server.calls("cancel_future") == []


def test_cancel_is_not_sent_without_dynamic_flags(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=60.0)
    server.inject("client_dynamic_config", Fault(status=404), times=None)
    service = connect(server)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(3)]
    server.wait_for("retrieve_future", 3)
    for future in futures:
        future.cancel()
    server.wait_for("client_dynamic_config")
    service.health()
    assert len(server.calls("client_dynamic_config")) == 1
    assert server.calls("cancel_future") == []


# --- large results ----------------------------------------------------------------------------


def test_large_result_is_announced_then_fetched(serve: Serve, connect: Connect) -> None:
    server = serve()
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    response = sampler.sample(PROMPT, 8, LARGE).result(TIMEOUT_SECONDS)
    assert [len(sequence.tokens) for sequence in response.sequences] == [5000] * 8
    assert [poll["allow_metadata_only"] for poll in polls(server)] == [True, False]


def test_large_results_share_byte_budget(serve: Serve, connect: Connect) -> None:
    """A budget smaller than one result admits them one at a time, without deadlock."""
    server = serve(client_config={"inflight_response_bytes_semaphore_size": 1000})
    service = connect(server)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    futures = [sampler.sample(PROMPT, 8, LARGE) for _ in range(4)]
    assert all(len(future.result(TIMEOUT_SECONDS).sequences) == 8 for future in futures)
    assert sampler.holder.response_budget.used_bytes == 0


def test_result_announced_repeatedly_is_typed_error(serve: Serve, connect: Connect) -> None:
    server = serve()
    announced = {"status": "complete_metadata", "response_payload_size": 10}
    server.inject("retrieve_future", Fault(status=200, body=announced), times=None)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    with pytest.raises(APIResponseValidationError, match="twice"):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)


# --- batched polling --------------------------------------------------------------------------


@pytest.fixture
def one_poll(serve: Serve) -> StubServer:
    return serve(client_config=ONE_POLL, work_seconds=0.1, long_poll_seconds=1.0)


def test_samples_share_one_poll(one_poll: StubServer, connect: Connect) -> None:
    sampler = connect(one_poll).create_sampling_client(base_model=BASE_MODEL)
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(30)]
    assert all(future.result(TIMEOUT_SECONDS).sequences for future in futures)
    fetched = [poll["request_id"] for poll in polls(one_poll)]
    # Each result is fetched once, when it is ready.
    assert len(fetched) == len(set(fetched)) == 30
    shared = [call.message for call in one_poll.calls("retrieve_futures")]
    assert len(shared) <= 31
    target = {"type": "sampling_session", "sampling_session_id": sampler.sampling_session_id}
    assert all(message["target"] == {**target, "cloned_sampler_id": 0} for message in shared)
    cursors = [message["prev_cursor"] for message in shared]
    assert cursors[0] == 0
    assert cursors == sorted(cursors)


def test_retrieved_results_are_acknowledged(one_poll: StubServer, connect: Connect) -> None:
    sampler = connect(one_poll).create_sampling_client(base_model=BASE_MODEL)
    for _ in range(3):
        sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS)
    told = [call.message["retrieved_request_ids"] for call in one_poll.calls("retrieve_futures")]
    fetched = [poll["request_id"] for poll in polls(one_poll)]
    assert [name for names in told for name in names] == fetched[:2]


def test_failures_are_reported_by_batched_poll(one_poll: StubServer, connect: Connect) -> None:
    sampler = connect(one_poll).create_sampling_client(base_model=BASE_MODEL, retry_config=QUICK)
    failure = {"error": "the weights are gone", "category": "user"}
    one_poll.inject("retrieve_future", Fault(status=200, body=failure))
    bad = sampler.sample(PROMPT, 1, SHORT)
    one_poll.wait_for("retrieve_future")
    good = sampler.sample(PROMPT, 1, SHORT)
    with pytest.raises(RequestFailedError, match="weights are gone"):
        bad.result(TIMEOUT_SECONDS)
    assert good.result(TIMEOUT_SECONDS).sequences


def test_batched_poll_survives_restart(one_poll: StubServer, connect: Connect) -> None:
    sampler = connect(one_poll).create_sampling_client(base_model=BASE_MODEL, retry_config=QUICK)
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(5)]
    one_poll.wait_for("retrieve_futures")
    one_poll.restart()
    assert all(future.result(TIMEOUT_SECONDS).sequences for future in futures)


def test_failed_batched_poll_fails_waiting_samples(one_poll: StubServer, connect: Connect) -> None:
    """No sample waits forever, and the next sample starts a new poll."""
    sampler = connect(one_poll).create_sampling_client(base_model=BASE_MODEL, retry_config=QUICK)
    one_poll.inject("retrieve_futures", Fault(status=404, body={"detail": "what?"}))
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(3)]
    failures = [future.exception(TIMEOUT_SECONDS) for future in futures]
    assert any(isinstance(failure, NotFoundError) for failure in failures)
    assert sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences


def test_cancelled_samples_leave_batched_poll(serve: Serve, connect: Connect) -> None:
    # Long enough that the cancellation arrives before the result on a busy machine.
    server = serve(client_config=ONE_POLL, dynamic_config=CAN_CANCEL, work_seconds=2.0)
    sampler = connect(server).create_sampling_client(base_model=BASE_MODEL)
    # The poll shows that the first one was submitted; one that was not is cancelled differently.
    first = sampler.sample(PROMPT, 1, SHORT)
    server.wait_for("retrieve_futures")
    second = sampler.sample(PROMPT, 1, SHORT)
    assert first.cancel()
    server.wait_for("cancel_future")
    assert second.result(TIMEOUT_SECONDS).sequences
    assert len(polls(server)) == 1
    # Cancelled results are acknowledged too, so that the server can drop them.
    assert sampler.sample(PROMPT, 1, SHORT).result(TIMEOUT_SECONDS).sequences
    told = [call.message["retrieved_request_ids"] for call in server.calls("retrieve_futures")]
    [cancelled] = [call.message["request_id"] for call in server.calls("cancel_future")]
    assert cancelled in [name for names in told for name in names]
