"""Operations are sent in call order, even if some fail or are cancelled."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from tests.integration.conftest import (
    BASE_MODEL,
    HELLO,
    TIMEOUT_SECONDS,
    Connect,
    Serve,
    base_logprobs,
    datum,
)
from tinkex import (
    AdamParams,
    APIStatusError,
    BadRequestError,
    InternalServerError,
    PromiseExpiredError,
    RequestFailedError,
    ServiceClient,
    TrainingClient,
)
from tinkex.errors import RequestErrorCategory
from tinkex.testing import Call, Fault, StubServer

ADAM = AdamParams(learning_rate=0.1)


@pytest.fixture
def server(serve: Serve) -> StubServer:
    """A server with a short wait for missing seq ids."""
    return serve(gap_seconds=0.05)


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(BASE_MODEL)


def steps(server: StubServer) -> list[int]:
    return [call.message["seq_id"] for call in server.calls("optim_step")]


def executed(server: StubServer) -> list[int | None]:
    return [number for _, number, _ in server.executed]


def at(number: int) -> Any:
    """Return a matcher for the call with this seq id."""

    def match(call: Call) -> bool:
        message = call.message
        return bool((message.seq_id if call.is_proto else message.get("seq_id")) == number)

    return match


# --- order ------------------------------------------------------------------------------------


def test_calls_of_one_thread_arrive_in_order(server: StubServer, client: TrainingClient) -> None:
    """Await nothing until all calls are made."""
    futures = [client.optim_step(ADAM) for _ in range(60)]
    assert futures[-1].result(TIMEOUT_SECONDS).metrics["step"] == 60.0
    assert steps(server) == list(range(1, 61))
    assert executed(server) == list(range(1, 61))


def test_calls_of_async_code_arrive_in_order(server: StubServer, client: TrainingClient) -> None:
    async def train() -> list[Any]:
        futures = []
        for _ in range(10):
            futures.append(await client.forward_backward_async([datum()], "cross_entropy"))
            futures.append(await client.optim_step_async(ADAM))
        return [await future for future in futures]

    outputs = asyncio.run(train())
    losses = [output.metrics["loss:sum"] for output in outputs[::2]]
    assert losses == sorted(losses, reverse=True)
    assert executed(server) == list(range(1, 21))
    assert [kind for _, _, kind in server.executed] == ["forward_backward", "optim_step"] * 10


def test_calls_of_many_threads_get_contiguous_seq_ids(
    server: StubServer, client: TrainingClient
) -> None:
    futures: list[Any] = []

    def work() -> None:
        for _ in range(20):
            futures.append(client.optim_step(ADAM))  # noqa: PERF401 - one by one is the point

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    for future in futures:
        future.result(TIMEOUT_SECONDS)
    assert steps(server) == list(range(1, 101))


def test_results_can_be_awaited_in_any_order(server: StubServer, client: TrainingClient) -> None:
    """The first future's poll is delayed, so later results arrive before it."""
    server.inject("retrieve_future", Fault(delay_seconds=0.3))
    first = client.optim_step(ADAM)
    later = [client.optim_step(ADAM) for _ in range(5)]
    assert [future.result(TIMEOUT_SECONDS).metrics["step"] for future in reversed(later)] == [
        6.0,
        5.0,
        4.0,
        3.0,
        2.0,
    ]
    assert not first.done()
    assert first.result(TIMEOUT_SECONDS).metrics["step"] == 1.0


def test_chunks_finished_out_of_order_are_merged_in_order(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"fwdbwd_max_chunk_len": 1})
    client = connect(server).create_lora_training_client(BASE_MODEL)
    late = Fault(delay_seconds=0.2)
    # The first poll after the model's creation is that of the first chunk.
    server.inject("retrieve_future", late)
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    output = client.forward([datum(row) for row in rows], "cross_entropy").result(TIMEOUT_SECONDS)
    got = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    assert got == [pytest.approx(base_logprobs(row).tolist(), rel=1e-5) for row in rows]


# --- failures do not block the queue ----------------------------------------------------------


def test_rejected_operation_does_not_block_queue(
    server: StubServer, client: TrainingClient
) -> None:
    server.inject("optim_step", Fault(status=400, body={"detail": "no"}), match=at(2))
    futures = [client.optim_step(ADAM) for _ in range(4)]
    with pytest.raises(BadRequestError, match="no"):
        futures[1].result(TIMEOUT_SECONDS)
    assert [futures[index].result(TIMEOUT_SECONDS).metrics["step"] for index in (0, 2, 3)] == [
        1,
        2,
        3,
    ]
    # Its seq id is used: the server sees a gap that is never filled.
    assert steps(server) == [1, 2, 3, 4]
    assert executed(server) == [1, 3, 4]


def test_failed_job_does_not_block_queue(server: StubServer, client: TrainingClient) -> None:
    client.save_state("one").result(TIMEOUT_SECONDS)
    bad = client.save_state("one")
    good = client.forward_backward([datum()], "cross_entropy")
    with pytest.raises(RequestFailedError, match="overwrite=True") as caught:
        bad.result(TIMEOUT_SECONDS)
    assert caught.value.category is RequestErrorCategory.User
    assert caught.value.request_id
    assert good.result(TIMEOUT_SECONDS).metrics["loss:sum"] == pytest.approx(
        -base_logprobs(HELLO).sum()
    )


def test_failed_chunk_fails_its_call_only(serve: Serve, connect: Connect) -> None:
    server = serve(client_config={"fwdbwd_max_chunk_len": 1}, gap_seconds=0.05)
    client = connect(server, max_retries=0).create_lora_training_client(BASE_MODEL)
    server.inject("forward_backward", Fault(status=500), match=at(2))
    passed = client.forward_backward([datum()] * 4, "cross_entropy")
    stepped = client.optim_step(ADAM)
    with pytest.raises(InternalServerError):
        passed.result(TIMEOUT_SECONDS)
    assert stepped.result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    assert steps(server) == [5]


def test_first_protobuf_error_is_raised(server: StubServer, client: TrainingClient) -> None:
    """A rejected first batch is retried as JSON; the error of the retry is not raised."""
    server.inject("forward_backward", Fault(status=422, body={"detail": "weights are missing"}))
    with pytest.raises(APIStatusError, match="weights are missing"):
        client.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)
    client.forward_backward([datum()], "cross_entropy").result(TIMEOUT_SECONDS)


def test_expired_future_raises(server: StubServer, client: TrainingClient) -> None:
    """Training must not be resubmitted automatically: it may have run."""
    server.inject("retrieve_future", Fault(status=410, body={"detail": "gone"}))
    with pytest.raises(PromiseExpiredError, match="gone"):
        client.optim_step(ADAM).result(TIMEOUT_SECONDS)
    assert len(server.calls("optim_step")) == 1


# --- cancelling -------------------------------------------------------------------------------


def test_cancelling_queued_operation_does_not_block_queue(
    server: StubServer, client: TrainingClient
) -> None:
    server.inject("optim_step", Fault(delay_seconds=0.2))
    first, second, third = (client.optim_step(ADAM) for _ in range(3))
    assert second.cancel()
    assert third.result(TIMEOUT_SECONDS).metrics["step"] == 2.0
    assert first.result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    with pytest.raises(CancelledError):
        second.result(TIMEOUT_SECONDS)
    assert steps(server) == [1, 3]


def test_cancel_operation_during_send(server: StubServer, client: TrainingClient) -> None:
    server.inject("optim_step", Fault(delay_seconds=30.0))
    first, second = client.optim_step(ADAM), client.optim_step(ADAM)
    server.wait_for("optim_step")
    assert first.cancel()
    assert second.result(TIMEOUT_SECONDS).metrics["step"] == 1.0


def test_cancel_operation_while_polling(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=1.0)
    client = connect(server).create_lora_training_client(BASE_MODEL)
    first, second = client.optim_step(ADAM), client.optim_step(ADAM)
    server.wait_for("optim_step", 2)
    assert first.cancel()
    # It was sent, so it runs; only its result is discarded.
    assert second.result(TIMEOUT_SECONDS).metrics["step"] == 2.0


def test_cancelled_await_unblocks_queue(server: StubServer, client: TrainingClient) -> None:
    server.inject("optim_step", Fault(delay_seconds=30.0))

    async def give_up() -> float:
        first = await client.optim_step_async(ADAM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.result_async(), 0.05)
        second = await client.optim_step_async(ADAM)
        metrics = (await second.result_async(TIMEOUT_SECONDS)).metrics
        return float(metrics["step"])

    assert asyncio.run(give_up()) == 1.0


def test_result_timeout_leaves_operation_running(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=1.0)
    client = connect(server).create_lora_training_client(BASE_MODEL)
    future = client.optim_step(ADAM)
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert future.result(TIMEOUT_SECONDS).metrics["step"] == 1.0


# --- lost responses and restarts --------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault(drop_after=True), Fault(drop=True), Fault(status=503)])
def test_lost_response_returns_same_future(
    server: StubServer, client: TrainingClient, fault: Fault
) -> None:
    server.inject("optim_step", fault)
    future = client.optim_step(ADAM)
    assert future.result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    first, second = server.calls("optim_step")
    assert first.body == second.body
    assert first.headers["x-idempotency-key"] == second.headers["x-idempotency-key"]
    assert [call.headers["x-stainless-retry-count"] for call in (first, second)] == ["0", "1"]
    assert executed(server) == [1]


def test_lost_response_of_batch_trains_once(
    server: StubServer, service: ServiceClient, client: TrainingClient
) -> None:
    server.inject("forward_backward", Fault(drop_after=True))
    norms = []
    for each in (client, service.create_lora_training_client(BASE_MODEL)):
        each.forward_backward([datum()], "cross_entropy")
        norms.append(each.optim_step(ADAM).result(TIMEOUT_SECONDS).metrics["grad_norm"])
    assert len(server.calls("forward_backward")) == 3
    assert executed(server) == [1, 2, 1, 2]
    # A batch that is counted twice would double the gradient.
    assert norms[0] == pytest.approx(norms[1])


@pytest.mark.parametrize("endpoint", ["create_session", "create_model"])
def test_lost_response_at_start_creates_nothing_twice(
    server: StubServer, service: ServiceClient, endpoint: str
) -> None:
    server.inject(endpoint, Fault(drop_after=True))
    client = service.create_lora_training_client(BASE_MODEL)
    assert len(server.calls(endpoint)) == 2
    assert len(server.sessions) == 1
    assert client.model_id.endswith(":train:0")


def test_restart_while_polling(serve: Serve, connect: Connect) -> None:
    server = serve(work_seconds=0.2)
    client = connect(server).create_lora_training_client(BASE_MODEL)
    futures = [client.optim_step(ADAM) for _ in range(3)]
    server.wait_for("retrieve_future", 2)
    server.stop()
    server.start()
    assert [future.result(TIMEOUT_SECONDS).metrics["step"] for future in futures] == [1.0, 2.0, 3.0]
    assert executed(server) == [1, 2, 3]


def test_restart_while_submitting(server: StubServer, client: TrainingClient) -> None:
    server.stop()
    futures = [client.optim_step(ADAM) for _ in range(5)]
    assert not any(future.done() for future in futures)
    server.start()
    assert [future.result(TIMEOUT_SECONDS).metrics["step"] for future in futures] == [1, 2, 3, 4, 5]
    assert executed(server) == [1, 2, 3, 4, 5]


def test_retry_blocks_later_operations(server: StubServer, client: TrainingClient) -> None:
    """A retried operation must not be overtaken by the next one."""
    server.inject("optim_step", Fault(status=503), match=at(1))
    first, second = client.optim_step(ADAM), client.optim_step(ADAM)
    assert second.result(TIMEOUT_SECONDS).metrics["step"] == 2.0
    assert first.result(TIMEOUT_SECONDS).metrics["step"] == 1.0
    assert steps(server) == [1, 1, 2]
