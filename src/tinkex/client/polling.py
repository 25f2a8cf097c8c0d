"""Poll for the result of a job: classify each response, then wait, return or raise."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from tinkex.client.http import HttpResponse
from tinkex.client.queue_state import QueueState, QueueStateNotifier
from tinkex.client.rate_limits import ByteBudget
from tinkex.client.retry import (
    BILLING_WAIT_SECONDS,
    MIN_LONG_POLL_SECONDS,
    QUICK_POLL_BACKOFF,
    RetryPolicy,
    backoff,
    parse_retry_after,
    valid_retry_after,
)
from tinkex.client.transport import PROTO_TYPE, Transport, build_request
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    ConnectTimeoutError,
    RequestErrorCategory,
    RequestFailedError,
    ResultTimeoutError,
    TinkexError,
)
from tinkex.logs import get_logger
from tinkex.types import FutureRetrieveRequest
from tinkex.wire.endpoints import RETRIEVE_FUTURE, JobEndpoint
from tinkex.wire.results import decode_result, has_proto_result, parse_error_body

ResultT = TypeVar("ResultT")
logger = get_logger(__name__)

#: Number of polls repeated after an ambiguous error, see is_bad_answer().
MAX_BAD_ANSWERS = 3
#: Statuses that servers use for a finished job.
DONE_STATUSES = frozenset({"completed", "complete", "done", "succeeded", "success", "ok"})
#: Results larger than this are decoded on another thread.
MIN_THREADED_DECODE_BYTES = 256 * 1024
_OUTAGE_BACKOFF = RetryPolicy(first_wait_seconds=0.5, max_wait_seconds=30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob(Generic[ResultT]):
    """A job the server accepted: the id of its future, or already the result."""

    endpoint: JobEndpoint[object, ResultT]
    request_id: str = ""
    sequence_ids: list[str] | None = None
    submit_seconds: float = 0.0
    result: ResultT | None = None
    request_type: str = ""


@dataclass(frozen=True, slots=True)
class ResultReady:
    """The response contains the result."""

    response: HttpResponse


@dataclass(frozen=True, slots=True)
class LargeResult:
    """The result is ready but large; the next poll returns it."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class ResultPending:
    """The job is queued or running."""

    state: QueueState = QueueState.ACTIVE
    reason: str | None = None
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PollFailure:
    """The poll or the job failed; the error is retryable if polling again may help."""

    error: TinkexError


PollOutcome = ResultReady | LargeResult | ResultPending | PollFailure


@dataclass(slots=True)
class PollPolicy:
    """Decides how long to wait after each poll; raises the error when polling must stop."""

    outage_seconds: float
    billing_pause_seconds: float
    num_quick_answers: int = 0
    num_bad_answers: int = 0
    num_unreachable: int = 0
    unreachable_since: float | None = None
    billing_since: float | None = None

    def wait_after(
        self, outcome: ResultPending | PollFailure, poll_seconds: float, now: float, jitter: float
    ) -> float:
        """Return the seconds to wait before the next poll, given how long this one lasted."""
        if isinstance(outcome, ResultPending):
            return self._after_pending(outcome, poll_seconds, jitter)
        error = outcome.error
        if error.status == 402:
            return self._after_billing(error, now)
        if is_bad_answer(error):
            self.num_bad_answers += 1
            if self.num_bad_answers <= MAX_BAD_ANSWERS:
                return backoff(QUICK_POLL_BACKOFF, self.num_bad_answers, jitter)
        elif error.retryable:
            return self._after_outage(error, now, jitter)
        raise error

    def _after_billing(self, error: TinkexError, now: float) -> float:
        self.unreachable_since = None
        self.billing_since = now if self.billing_since is None else self.billing_since
        remaining = self.billing_pause_seconds - (now - self.billing_since)
        if remaining <= 0.0:
            raise error
        return min(BILLING_WAIT_SECONDS, remaining)

    def _after_outage(self, error: TinkexError, now: float, jitter: float) -> float:
        self.unreachable_since = now if self.unreachable_since is None else self.unreachable_since
        if now - self.unreachable_since >= self.outage_seconds:
            raise error
        self.num_unreachable += 1
        retry_after = getattr(error, "retry_after_seconds", None) or 0.0
        return max(retry_after, backoff(_OUTAGE_BACKOFF, self.num_unreachable, jitter))

    def _after_pending(self, outcome: ResultPending, poll_seconds: float, jitter: float) -> float:
        self.unreachable_since = self.billing_since = None
        self.num_bad_answers = self.num_unreachable = 0
        if poll_seconds >= MIN_LONG_POLL_SECONDS:
            self.num_quick_answers = 0
            return outcome.wait_seconds or 0.0
        self.num_quick_answers += 1
        floor = 0.0 if outcome.state is QueueState.ACTIVE else 1.0
        wait = outcome.wait_seconds or backoff(QUICK_POLL_BACKOFF, self.num_quick_answers, jitter)
        return max(floor, wait)


def is_bad_answer(error: TinkexError) -> bool:
    """True for a status that means "the job failed" on some servers and is transient on others."""
    if not isinstance(error, APIStatusError):
        return False
    if error.should_retry is not None:
        return False
    # A text page comes from a proxy and is transient; a JSON error body comes from the server.
    has_reason = isinstance(error.body, dict) and parse_error_body(error.body) is not None
    return error.status == 400 or (error.status == 500 and has_reason)


def classify_response(
    response: HttpResponse, error_from_response: Callable[[HttpResponse], TinkexError]
) -> PollOutcome:
    """Classify the response to a poll, for all server dialects."""
    if response.status_code == 408:
        return _parse_pending(_json_object(response), response)
    if not 200 <= response.status_code < 300:
        return PollFailure(error_from_response(response))
    return ResultReady(response) if response.is_proto else _classify_json(response)


def _classify_json(response: HttpResponse) -> PollOutcome:
    body = _json_object(response)
    status = body.get("status")
    if body.get("type") == "try_again" or status in {"pending", "running", "queued"}:
        return _parse_pending(body, response)
    if status == "complete_metadata":
        size = body.get("response_payload_size")
        return LargeResult(max(0, size) if isinstance(size, int) else 0)
    if status == "failed" or ("error" in body and body["error"] is not None):
        return PollFailure(_parse_failure(body))
    if status is None or status in DONE_STATUSES:
        return ResultReady(response)
    text = f"The server returned a result with the unknown status {status!r}"
    return PollFailure(APIResponseValidationError(response, body, text))


def _json_object(response: HttpResponse) -> dict[str, object]:
    try:
        body = response.json()
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {}


def _parse_pending(body: dict[str, object], response: HttpResponse) -> ResultPending:
    millis = body.get("retry_after_ms")
    wait = valid_retry_after(millis / 1000.0) if isinstance(millis, int | float) else None
    if wait is None:
        wait = parse_retry_after(response.headers)
    state = QueueState.parse(body["queue_state"]) if "queue_state" in body else QueueState.ACTIVE
    reason = body.get("queue_state_reason")
    return ResultPending(state, reason if isinstance(reason, str) else None, wait)


def _parse_failure(body: dict[str, object]) -> RequestFailedError:
    fault = parse_error_body(body)
    if fault is None:
        return RequestFailedError("The request failed on the server; no reason was given")
    return RequestFailedError(
        fault.message,
        str(body.get("request_id") or ""),
        fault.category or RequestErrorCategory.Unknown,
    )


@dataclass(slots=True)
class Poller:
    """Waits for the results of one client's jobs."""

    transport: Transport
    queue_notifier: QueueStateNotifier
    response_budget: ByteBudget
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    async def wait(self, job: SubmittedJob[ResultT]) -> ResultT:
        """Return the decoded result of a job; raises if the job failed or polling gave up."""
        if job.result is not None:
            return job.result
        config = self.transport.config
        policy = PollPolicy(config.outage_seconds, self.transport.billing_pause_seconds)
        ends_at = self.clock() + (config.poll_timeout_seconds or float("inf"))
        iteration = 0
        while True:
            started = self.clock()
            headers = _poll_headers(job, iteration)
            seconds = min(config.poll_request_seconds, ends_at - started)
            outcome = await self._poll(job.request_id, headers, seconds)
            if isinstance(outcome, ResultReady):
                return await self._decode(job.endpoint, outcome.response)
            iteration += 1
            wait = self._next_wait(policy, outcome, started, job.request_id)
            if self.clock() + wait >= ends_at:
                limit = config.poll_timeout_seconds
                raise ResultTimeoutError(None, f"No result for {job.request_id} within {limit:g} s")
            await self.sleep(wait)

    def _next_wait(
        self, policy: PollPolicy, outcome: PollOutcome, started: float, request_id: str
    ) -> float:
        assert isinstance(outcome, ResultPending | PollFailure)
        if isinstance(outcome, ResultPending):
            self.queue_notifier.update(outcome.state, outcome.reason)
        elif isinstance(outcome.error, RequestFailedError):
            outcome.error.request_id = outcome.error.request_id or request_id
            raise outcome.error
        elif outcome.error.status == 402:
            self.queue_notifier.update(QueueState.PAUSED_RATE_LIMIT, str(outcome.error))
        now = self.clock()
        return policy.wait_after(outcome, now - started, now, random.random())

    async def _poll(self, request_id: str, headers: dict[str, str], seconds: float) -> PollOutcome:
        """Poll once; a large result is fetched after reserving its size in the byte budget."""
        outcome = await self._poll_once(request_id, headers, seconds, allow_metadata=True)
        if not isinstance(outcome, LargeResult):
            return outcome
        async with self.response_budget.reserve(outcome.num_bytes):
            outcome = await self._poll_once(request_id, headers, seconds, allow_metadata=False)
        if not isinstance(outcome, LargeResult):
            return outcome
        text = f"The server announced the result of {request_id} twice but did not send it"
        return PollFailure(APIResponseValidationError(None, None, text))

    async def _poll_once(
        self, request_id: str, headers: dict[str, str], seconds: float, allow_metadata: bool
    ) -> PollOutcome:
        self.transport.metrics.count("polls")
        message = FutureRetrieveRequest(request_id=request_id, allow_metadata_only=allow_metadata)
        request = build_request(RETRIEVE_FUTURE, message, headers=headers, timeout_seconds=seconds)
        try:
            response = await self.transport.send_raw(request)
        except ConnectTimeoutError as error:
            return PollFailure(error)
        except APITimeoutError:
            # A poll that timed out is a long poll without news.
            return ResultPending()
        except APIConnectionError as error:
            return PollFailure(error)
        return classify_response(response, self.transport.error_from_response)

    async def _decode(
        self, endpoint: JobEndpoint[object, ResultT], response: HttpResponse
    ) -> ResultT:
        try:
            if len(response.content) > MIN_THREADED_DECODE_BYTES:
                return await asyncio.to_thread(
                    decode_result, endpoint, response.content, response.is_proto
                )
            return decode_result(endpoint, response.content, response.is_proto)
        except (ValueError, msgspec.MsgspecError) as error:
            excerpt = repr(response.content[:200])
            text = f"Invalid result of {endpoint.name}: {error}; got {excerpt}"
            raise APIResponseValidationError(response, excerpt, text) from error


def _poll_headers(job: SubmittedJob[ResultT], iteration: int) -> dict[str, str]:
    headers = {
        "x-tinker-request-iteration": str(iteration),
        "x-tinker-request-type": job.request_type or job.endpoint.request_type,
    }
    if iteration == 0:
        headers["x-tinker-create-promise-roundtrip-time"] = f"{job.submit_seconds:.6f}"
    if has_proto_result(job.endpoint):
        headers["accept"] = PROTO_TYPE
    return headers
