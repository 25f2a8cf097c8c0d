"""Classification of poll responses, and the wait after each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.config import Config
from tinkex.client.http import HttpResponse
from tinkex.client.polling import (
    BILLING_WAIT_SECONDS,
    MAX_BAD_ANSWERS,
    MIN_LONG_POLL_SECONDS,
    LargeResult,
    PollFailure,
    PollOutcome,
    PollPolicy,
    ResultPending,
    ResultReady,
    classify_response,
)
from tinkex.client.queue_state import QueueState
from tinkex.client.transport import Transport
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    InternalServerError,
    NotFoundError,
    PromiseExpiredError,
    RateLimitError,
    RequestErrorCategory,
    RequestFailedError,
)

JSON = {"content-type": "application/json"}
PROTO = {"content-type": "application/x-protobuf"}
DONE = {"metrics": {"grad_norm": 1.0}}
PENDING = {"type": "try_again", "request_id": "r-1", "queue_state": "active"}


def response(status: int, body: object = None, **headers: str) -> HttpResponse:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpResponse(status, JSON | named, b"" if body is None else content)


async def no_credential() -> None:
    return None


def transport(http: Any = None, **options: Any) -> Transport:
    config = Config(base_url="http://host", **options)
    return Transport(config, http, no_credential)


def outcome_of(status: int, body: object = None, **headers: str) -> PollOutcome:
    return classify_response(response(status, body, **headers), transport().error_from_response)


# --- classification -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, PENDING, ResultPending()),
        (200, {"type": "try_again"}, ResultPending()),
        (200, {"status": "pending"}, ResultPending()),
        (
            200,
            {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "full"},
            ResultPending(QueueState.PAUSED_CAPACITY, "full"),
        ),
        (
            200,
            {"status": "pending", "queue_state": "PAUSED_RATE_LIMIT", "retry_after_ms": 2500},
            ResultPending(QueueState.PAUSED_RATE_LIMIT, None, 2.5),
        ),
        (200, {"type": "try_again", "queue_state": "lunch"}, ResultPending(QueueState.UNKNOWN)),
        (408, None, ResultPending()),
        (408, b"<html>timeout</html>", ResultPending()),
        (408, ["odd"], ResultPending()),
        (
            408,
            {"queue_state": "paused_rate_limit", "queue_state_reason": "three"},
            ResultPending(QueueState.PAUSED_RATE_LIMIT, "three"),
        ),
        (408, {"queue_state": None, "queue_state_reason": None}, ResultPending()),
        (200, {"status": "complete_metadata", "response_payload_size": 77}, LargeResult(77)),
        (200, {"status": "complete_metadata"}, LargeResult(0)),
        (200, {"status": "complete_metadata", "response_payload_size": "many"}, LargeResult(0)),
        (200, {"status": "complete_metadata", "response_payload_size": -5}, LargeResult(0)),
    ],
)
def test_pending_response_is_recognized(status: int, body: object, expected: PollOutcome) -> None:
    assert outcome_of(status, body) == expected


def test_retry_after_header_sets_wait() -> None:
    assert outcome_of(408, None, retry_after="3") == ResultPending(wait_seconds=3.0)
    assert outcome_of(200, PENDING, retry_after_ms="1500") == ResultPending(wait_seconds=1.5)


@pytest.mark.parametrize(
    "body",
    [
        DONE,
        {"status": "completed", "result": DONE},
        {"type": "optim_step", "metrics": None},
        {"loss_fn_output_type": "x", "loss_fn_outputs": [], "metrics": {}},
        {"error": None, "metrics": {}},
        b"not json",
        None,
    ],
)
def test_response_with_a_result_is_ready(body: object) -> None:
    assert isinstance(outcome_of(200, body), ResultReady)


def test_protobuf_response_is_a_result() -> None:
    answer = HttpResponse(200, PROTO, b"\x00")
    assert classify_response(answer, transport().error_from_response) == ResultReady(answer)


@pytest.mark.parametrize(
    ("body", "message", "category"),
    [
        ({"error": "boom", "category": "user"}, "boom", RequestErrorCategory.User),
        ({"error": "boom", "category": "SERVER"}, "boom", RequestErrorCategory.Server),
        ({"error": "boom", "category": "odd"}, "boom", RequestErrorCategory.Unknown),
        ({"error": "boom"}, "boom", RequestErrorCategory.Unknown),
        ({"status": "failed", "error": "boom"}, "boom", RequestErrorCategory.Unknown),
        (
            {"status": "failed"},
            "The request failed on the server; no reason was given",
            RequestErrorCategory.Unknown,
        ),
        ({"status": "failed", "detail": "oom"}, "oom", RequestErrorCategory.Unknown),
    ],
)
def test_failed_job_response_is_a_request_failed_error(
    body: object, message: str, category: RequestErrorCategory
) -> None:
    outcome = outcome_of(200, body)
    assert isinstance(outcome, PollFailure)
    assert isinstance(outcome.error, RequestFailedError)
    assert (outcome.error.message, outcome.error.category) == (message, category)


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (402, BillingError),
        (404, NotFoundError),
        (410, PromiseExpiredError),
        (418, APIStatusError),
        (429, RateLimitError),
        (500, InternalServerError),
        (503, InternalServerError),
        (302, APIStatusError),
    ],
)
def test_error_statuses_are_typed(status: int, cls: type[APIStatusError]) -> None:
    outcome = outcome_of(status, {"detail": "no"}, retry_after="4")
    assert isinstance(outcome, PollFailure)
    error = outcome.error
    assert type(error) is cls
    assert isinstance(error, APIStatusError)
    assert (error.status, error.retry_after_seconds) == (status, 4.0)


# --- waits --------------------------------------------------------------------------------


def make_policy(outage: float = 300.0, billing: float = 3600.0) -> PollPolicy:
    return PollPolicy(outage, billing)


def refusal(status: int, body: object = None, **headers: str) -> PollFailure:
    outcome = outcome_of(status, body, **headers)
    assert isinstance(outcome, PollFailure)
    return outcome


def after(
    policy: PollPolicy, outcome: ResultPending | PollFailure, lasted: float = 0.0, now: float = 0.0
) -> float:
    return policy.wait_after(outcome, lasted, now, 1.0)


def test_long_poll_is_repeated_without_wait() -> None:
    policy = make_policy()
    assert [after(policy, ResultPending(), lasted=30.0) for _ in range(5)] == [0.0] * 5
    assert (
        after(policy, ResultPending(QueueState.PAUSED_CAPACITY), lasted=MIN_LONG_POLL_SECONDS)
        == 0.0
    )


def test_fast_responses_back_off() -> None:
    policy = make_policy()
    waits = [after(policy, ResultPending(), lasted=0.01) for _ in range(9)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    # A real long poll in between resets it.
    after(policy, ResultPending(), lasted=30.0)
    assert after(policy, ResultPending(), lasted=0.01) == 0.1


def test_paused_queue_is_polled_at_most_once_per_second() -> None:
    for state in (QueueState.PAUSED_CAPACITY, QueueState.PAUSED_RATE_LIMIT, QueueState.UNKNOWN):
        assert after(make_policy(), ResultPending(state)) == 1.0
        assert after(make_policy(), ResultPending(state, wait_seconds=0.2)) == 1.0
        assert after(make_policy(), ResultPending(state, wait_seconds=7.0)) == 7.0


def test_server_wait_is_honoured() -> None:
    assert after(make_policy(), ResultPending(wait_seconds=3.0), lasted=0.1) == 3.0
    assert after(make_policy(), ResultPending(wait_seconds=3.0), lasted=30.0) == 3.0


@pytest.mark.parametrize(
    ("status", "body"),
    [(400, {"detail": "no"}), (400, None), (400, b"<html>"), (500, {"detail": "oom"})],
)
def test_ambiguous_errors_are_retried_a_few_times(status: int, body: object) -> None:
    policy = make_policy()
    for _ in range(MAX_BAD_ANSWERS):
        assert 0.0 < after(policy, refusal(status, body)) < 1.0
    with pytest.raises(APIStatusError) as caught:
        after(policy, refusal(status, body))
    assert caught.value.status == status


def test_pending_response_resets_ambiguous_error_count() -> None:
    policy = make_policy()
    for _ in range(5):
        for _ in range(MAX_BAD_ANSWERS):
            after(policy, refusal(400))
        after(policy, ResultPending())


@pytest.mark.parametrize(
    "outcome",
    [*map(refusal, (502, 503, 504, 500, 429)), PollFailure(APIConnectionError())],
    ids=lambda outcome: str(outcome.error.status),
)
def test_outage_is_limited_by_time(outcome: PollFailure) -> None:
    policy = make_policy(outage=60.0)
    now, waits = 1000.0, []
    with pytest.raises(type(outcome.error)):
        while True:
            waits.append(after(policy, outcome, now=now))
            now += waits[-1]
    assert waits[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert 60.0 <= sum(waits) < 100.0


def test_outage_time_resets_after_response() -> None:
    policy = make_policy(outage=60.0)
    after(policy, refusal(503), now=0.0)
    after(policy, ResultPending(), now=50.0)
    assert after(policy, refusal(503), now=100.0) == 0.5
    assert after(policy, refusal(503), now=150.0) == 1.0


def test_overloaded_server_retry_after_is_honoured() -> None:
    assert after(make_policy(), refusal(429, None, retry_after="20")) == 20.0
    assert after(make_policy(), refusal(503, None, retry_after_ms="100")) == 0.5


def test_billing_issue_pauses_then_raises() -> None:
    policy = make_policy(outage=1.0, billing=12.0)
    assert after(policy, refusal(402), now=0.0) == BILLING_WAIT_SECONDS
    assert after(policy, refusal(402), now=5.0) == BILLING_WAIT_SECONDS
    assert 0.0 < after(policy, refusal(402), now=10.0) <= BILLING_WAIT_SECONDS
    with pytest.raises(BillingError):
        after(policy, refusal(402), now=12.0)
    with pytest.raises(BillingError):
        after(make_policy(billing=0.0), refusal(402))


@pytest.mark.parametrize("status", [401, 403, 404, 410, 422, 302])
def test_final_errors_are_raised_immediately(status: int) -> None:
    with pytest.raises(APIStatusError) as caught:
        after(make_policy(), refusal(status))
    assert caught.value.status == status


def test_should_retry_header_is_honoured() -> None:
    with pytest.raises(InternalServerError):
        after(make_policy(), refusal(503, None, x_should_retry="false"))
    assert after(make_policy(), refusal(404, None, x_should_retry="true")) == 0.5


ANSWERS: list[ResultPending | PollFailure] = [
    *(refusal(status) for status in (302, 400, 401, 402, 404, 410, 429, 500, 503)),
    refusal(500, {"detail": "x"}),
    PollFailure(APIConnectionError()),
    ResultPending(),
    ResultPending(QueueState.PAUSED_CAPACITY, None, 0.5),
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, len(ANSWERS) - 1), st.floats(0.0, 50.0)), max_size=40))
def test_only_long_poll_is_followed_by_no_wait(steps: list[tuple[int, float]]) -> None:
    policy, now = make_policy(), 0.0
    for index, lasted in steps:
        outcome = ANSWERS[index]
        now += lasted
        try:
            wait = after(policy, outcome, lasted, now)
        except APIStatusError as error:
            assert isinstance(outcome, PollFailure)
            assert error is outcome.error
            return
        is_long_poll = isinstance(outcome, ResultPending) and lasted >= MIN_LONG_POLL_SECONDS
        assert wait > 0.0 or is_long_poll
        now += wait


# --- invalid responses --------------------------------------------------------------------


@pytest.mark.parametrize("status", ["cancelled", "in_progress", "expired"])
def test_unknown_status_is_not_a_result(status: str) -> None:
    outcome = outcome_of(200, {"status": status, "request_id": "r-1"})
    assert isinstance(outcome, PollFailure)
    assert isinstance(outcome.error, APIResponseValidationError)


@pytest.mark.parametrize("millis", [-1, -60_000, 10**12])
def test_excessive_retry_after_is_ignored(millis: int) -> None:
    outcome = outcome_of(200, PENDING | {"retry_after_ms": millis})
    assert isinstance(outcome, ResultPending)
    assert 0.0 < after(make_policy(), outcome) <= 60.0


def test_outage_after_billing_issue_gets_full_time() -> None:
    policy = make_policy(outage=300.0, billing=3600.0)
    after(policy, refusal(402), now=0.0)
    after(policy, refusal(402), now=1800.0)
    assert after(policy, refusal(503), now=1805.0) > 0.0


def test_500_without_json_reason_is_outage() -> None:
    policy = make_policy(outage=60.0)
    for _ in range(2 * MAX_BAD_ANSWERS):
        assert after(policy, refusal(500, b"Internal Server Error")) > 0.0
