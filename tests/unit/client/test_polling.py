"""Polling for a result, with a scripted server and a fake clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from tinkex.client.config import Config
from tinkex.client.http import HttpResponse
from tinkex.client.polling import MAX_BAD_ANSWERS, Poller, SubmittedJob
from tinkex.client.queue_state import QueueState, QueueStateNotifier
from tinkex.client.rate_limits import ByteBudget
from tinkex.client.transport import Transport
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConnectTimeoutError,
    NotFoundError,
    PromiseExpiredError,
    RequestFailedError,
)
from tinkex.types import ForwardBackwardOutput, TensorData
from tinkex.wire.endpoints import FORWARD_BACKWARD, LOAD_WEIGHTS, OPTIM_STEP, SAMPLE, Endpoint
from tinkex.wire.proto import encode_forward_backward_output

JSON = {"content-type": "application/json"}
PROTO = {"content-type": "application/x-protobuf"}
DONE = {"metrics": {"grad_norm": 1.0}}
PENDING = {"type": "try_again", "request_id": "r-1", "queue_state": "active"}


def response(status: int, body: object = None) -> HttpResponse:
    return HttpResponse(status, JSON, b"" if body is None else json.dumps(body).encode())


async def no_credential() -> None:
    return None


def transport(http: Any, **options: Any) -> Transport:
    return Transport(Config(base_url="http://host", **options), http, no_credential)


class Sent(NamedTuple):
    """One recorded poll."""

    at: float
    headers: dict[str, str]
    body: dict[str, Any]
    timeout: float


@dataclass
class FakeServer:
    """A server with scripted responses, and a fake clock that advances on waits."""

    script: Iterable[HttpResponse | Exception | tuple[float, HttpResponse | Exception]]
    now: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    seen: list[tuple[QueueState, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._answers = iter(self.script)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    async def send(
        self, method: str, url: str, headers: dict[str, str], body: bytes, timeout: float
    ) -> HttpResponse:
        assert (method, url) == ("POST", "http://host/api/v1/retrieve_future")
        self.sent.append(Sent(self.now, dict(headers), json.loads(body), timeout))
        answer = next(self._answers)
        if isinstance(answer, tuple):
            self.now += answer[0]
            answer = answer[1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def on_queue_state_change(self, state: QueueState, reason: str | None) -> None:
        self.seen.append((state, reason))

    def wait_for(
        self,
        endpoint: Endpoint[Any, Any] = OPTIM_STEP,
        kind: str = "",
        budget: ByteBudget | None = None,
        **options: Any,
    ) -> Any:
        notifier = QueueStateNotifier(self, lambda callback: callback())
        job = SubmittedJob(
            endpoint=endpoint, request_id="r-1", submit_seconds=0.25, request_type=kind
        )
        poller = Poller(
            transport(self, **options), notifier, budget or ByteBudget(100), self.clock, self.sleep
        )
        return asyncio.run(poller.wait(job))


def test_result_is_decoded() -> None:
    server = FakeServer([response(200, DONE)])
    assert server.wait_for().metrics == {"grad_norm": 1.0}
    assert server.slept == []
    assert server.sent[0].body == {"request_id": "r-1", "allow_metadata_only": True}
    assert server.sent[0].timeout == 45.0


def test_wrapped_result_is_decoded() -> None:
    server = FakeServer([response(200, {"status": "completed", "result": DONE})])
    assert server.wait_for().metrics == {"grad_norm": 1.0}


def test_headers_number_polls_and_time_submission() -> None:
    server = FakeServer(
        [(30.0, response(408)), (30.0, response(200, PENDING)), response(200, DONE)]
    )
    server.wait_for()
    numbers = [poll.headers["x-tinker-request-iteration"] for poll in server.sent]
    assert numbers == ["0", "1", "2"]
    timed = [poll.headers.get("x-tinker-create-promise-roundtrip-time") for poll in server.sent]
    assert timed == ["0.250000", None, None]
    assert {poll.headers["x-tinker-request-type"] for poll in server.sent} == {"OptimStep"}
    assert {poll.headers["accept"] for poll in server.sent} == {"application/json"}
    # A poll is one attempt; the poll loop retries.
    assert {poll.headers["x-stainless-retry-count"] for poll in server.sent} == {"0"}


def test_accept_header_requests_protobuf_if_supported() -> None:
    output = ForwardBackwardOutput(
        "ArrayRecord", [{"logprobs": TensorData([0.5], "float32")}], {"loss:sum": 2.0}
    )
    answer = HttpResponse(200, PROTO, encode_forward_backward_output(output))
    server = FakeServer([answer])
    result = server.wait_for(FORWARD_BACKWARD, kind="Forward")
    assert result.metrics == {"loss:sum": 2.0}
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == [0.5]
    assert server.sent[0].headers["accept"] == "application/x-protobuf"
    assert server.sent[0].headers["x-tinker-request-type"] == "Forward"


def test_large_result_is_decoded_off_the_loop() -> None:
    many = {f"m{index}": 1.0 for index in range(30_000)}
    server = FakeServer([response(200, {"metrics": many})])
    assert server.wait_for().metrics == many


def test_long_polls_follow_without_wait() -> None:
    server = FakeServer([*[(30.0, response(408))] * 4, response(200, DONE)])
    server.wait_for()
    assert server.slept == [0.0] * 4


def test_server_without_long_polling_is_polled_with_backoff() -> None:
    server = FakeServer([*[response(200, PENDING)] * 40, response(200, DONE)])
    server.wait_for()
    assert len(server.sent) / server.now < 0.2


def test_timed_out_poll_counts_as_pending() -> None:
    server = FakeServer([APITimeoutError(), (30.0, response(408)), response(200, DONE)])
    assert server.wait_for().metrics is not None


def test_polling_survives_server_restart() -> None:
    server = FakeServer([APIConnectionError(), response(503), response(502), response(200, DONE)])
    assert server.wait_for().metrics is not None
    assert 0.375 + 0.75 + 1.5 <= sum(server.slept) <= 3.5


def test_polling_gives_up_after_outage_limit() -> None:
    server = FakeServer([APIConnectionError(None, "gone")] * 99)
    with pytest.raises(APIConnectionError, match="gone"):
        server.wait_for(outage_seconds=20.0)
    assert 20.0 <= server.now < 45.0


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
def test_failed_job_raises_immediately(category: str) -> None:
    server = FakeServer([response(200, {"error": "boom", "category": category})])
    with pytest.raises(RequestFailedError, match="boom") as caught:
        server.wait_for()
    assert (caught.value.category, caught.value.request_id) == (category, "r-1")
    assert len(server.sent) == 1


def test_ambiguous_error_is_retried_before_raising() -> None:
    server = FakeServer([response(400, {"detail": "lost"})] * 3 + [response(200, DONE)])
    assert server.wait_for().metrics is not None
    server = FakeServer([response(400, {"detail": "lost"})] * 9)
    with pytest.raises(BadRequestError, match="Error code: 400 - lost"):
        server.wait_for()
    assert len(server.sent) == 1 + MAX_BAD_ANSWERS


@pytest.mark.parametrize(
    ("status", "cls"),
    [(401, AuthenticationError), (404, NotFoundError), (410, PromiseExpiredError)],
)
def test_final_error_ends_polling(status: int, cls: type[Exception]) -> None:
    server = FakeServer([response(status, {"detail": "no"})])
    with pytest.raises(cls):
        server.wait_for()
    assert len(server.sent) == 1


def test_billing_issue_notifies_observer_and_waits() -> None:
    paid = FakeServer([*[response(402, {"detail": "pay"})] * 3, response(200, DONE)])
    assert paid.wait_for().metrics is not None
    assert paid.slept == [5.0] * 3
    assert [state for state, _ in paid.seen] == [QueueState.PAUSED_RATE_LIMIT]
    assert "pay" in str(paid.seen[0][1])
    unpaid = FakeServer([response(402, {"detail": "pay"})] * 99)
    with pytest.raises(BillingError, match="pay"):
        unpaid.wait_for(billing_pause_seconds=20.0)
    assert unpaid.now == pytest.approx(20.0)


def test_observer_is_notified_once_per_state_change() -> None:
    paused = {"queue_state": "paused_capacity", "queue_state_reason": "full"}
    server = FakeServer(
        [
            (30.0, response(408, paused)),
            (30.0, response(200, {"type": "try_again", **paused})),
            (30.0, response(200, PENDING)),
            response(200, DONE),
        ]
    )
    server.wait_for()
    assert server.seen == [(QueueState.PAUSED_CAPACITY, "full"), (QueueState.ACTIVE, None)]


# --- large results ------------------------------------------------------------------------


def test_large_result_waits_for_byte_budget() -> None:
    server = FakeServer(
        [
            response(200, {"status": "complete_metadata", "response_payload_size": 70}),
            response(200, DONE),
        ]
    )
    budget = ByteBudget(100)
    assert server.wait_for(budget=budget).metrics is not None
    assert [poll.body["allow_metadata_only"] for poll in server.sent] == [True, False]
    assert budget.used_bytes == 0


def test_byte_budget_is_held_while_fetching() -> None:
    budget = ByteBudget(100)
    used: list[int] = []

    def answers() -> Iterable[HttpResponse]:
        yield response(200, {"status": "complete_metadata", "response_payload_size": 70})
        used.append(budget.used_bytes)
        yield response(200, DONE)

    FakeServer(answers()).wait_for(budget=budget)
    assert used == [70]


def test_result_announced_twice_is_an_error() -> None:
    announced = response(200, {"status": "complete_metadata", "response_payload_size": 7})
    with pytest.raises(APIResponseValidationError, match="twice"):
        FakeServer([announced] * 2).wait_for()


def test_error_while_fetching_large_result_restarts_polling() -> None:
    announced = response(200, {"status": "complete_metadata", "response_payload_size": 7})
    server = FakeServer([announced, response(503), announced, response(200, DONE)])
    assert server.wait_for().metrics is not None


# --- invalid results ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"5",
        b'"text"',
        b'{"metrics": 5}',
        b'{"metrics": {"a": null}}',
        b'{"metrics": {"a": "x"}}',
        b'{"metrics": {"a": NaN}}',
        b'{"status": "completed", "result": null}',
    ],
)
def test_invalid_result_is_response_error(content: bytes) -> None:
    answer = HttpResponse(200, JSON, content)
    with pytest.raises(APIResponseValidationError, match="Invalid result of optim_step") as caught:
        FakeServer([answer]).wait_for()
    assert caught.value.is_user_error is False
    assert caught.value.response is answer


def test_unexpected_protobuf_is_response_error() -> None:
    with pytest.raises(APIResponseValidationError, match="no binary result"):
        FakeServer([HttpResponse(200, PROTO, b"\x01")]).wait_for()


@pytest.mark.parametrize("endpoint", [FORWARD_BACKWARD, SAMPLE, LOAD_WEIGHTS])
@pytest.mark.parametrize("content", [b"\x0a", b"\xff\xff\xff\xff", b"{}"])
def test_corrupt_protobuf_is_response_error(endpoint: Endpoint[Any, Any], content: bytes) -> None:
    with pytest.raises(APIResponseValidationError, match=endpoint.name):
        FakeServer([HttpResponse(200, PROTO, content)]).wait_for(endpoint)


# --- time limits --------------------------------------------------------------------------


def test_poll_timeout_limits_wait() -> None:
    server = FakeServer([(30.0, response(408))] * 9)
    with pytest.raises(APITimeoutError, match=r"No result for r-1 within 100 s"):
        server.wait_for(poll_timeout_seconds=100.0)
    assert 90.0 <= server.now <= 130.0


def test_poll_request_timeout_is_capped_by_remaining_time() -> None:
    server = FakeServer([(30.0, response(408))] * 9)
    with pytest.raises(APITimeoutError):
        server.wait_for(poll_timeout_seconds=50.0)
    assert [poll.timeout for poll in server.sent] == [45.0, 20.0]


def test_no_poll_timeout_waits_indefinitely() -> None:
    server = FakeServer([*[(45.0, response(408))] * 500, response(200, DONE)])
    assert server.wait_for().metrics is not None
    assert server.now > 20_000


def test_polls_are_counted() -> None:
    server = FakeServer([response(408), response(200, DONE)])
    speaker = transport(server)
    poller = Poller(
        speaker,
        QueueStateNotifier(server, lambda tell: tell()),
        ByteBudget(9),
        server.clock,
        server.sleep,
    )
    asyncio.run(poller.wait(SubmittedJob(endpoint=OPTIM_STEP, request_id="r-1")))
    assert speaker.metrics.counters["polls"] == 2


def test_connect_timeouts_count_as_outage() -> None:
    def swallow() -> Iterable[tuple[float, Exception]]:
        for _ in range(400):
            yield 5.0, ConnectTimeoutError(None, "host did not accept a connection within 5 s")

    with pytest.raises(APIConnectionError, match="did not accept a connection"):
        FakeServer(swallow()).wait_for(outage_seconds=60.0)
