"""Waiting for a promise: one answer is classified, then one function decides what follows."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tinkex.client.budget import ByteBudget
from tinkex.client.http import HttpResponse
from tinkex.client.queue_state import QueueState, QueueWatch
from tinkex.client.retry import (
    BILLING_WAIT_SECONDS,
    QUICK_SECONDS,
    SOON,
    RetryPolicy,
    backoff,
    believed,
    retry_after,
)
from tinkex.client.transport import PROTO_TYPE, Transport, outgoing
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
from tinkex.wire.endpoints import RETRIEVE_FUTURE, Endpoint
from tinkex.wire.faults import parse_error_body
from tinkex.wire.results import decode_result, has_proto_result

logger = get_logger(__name__)

#: How often an answer that looks like a failure of the request is asked for again.
MAX_BAD_ANSWERS = 3
#: What servers call a result that is there.
DONE_WORDS = frozenset({"completed", "complete", "done", "succeeded", "success", "ok"})
#: Results larger than this are decoded on another thread.
LARGE_BYTES = 256 * 1024
_LATER = RetryPolicy(first_wait_seconds=0.5, max_wait_seconds=30.0)


@dataclass(frozen=True, slots=True)
class Done:
    """The result is here."""

    response: HttpResponse


@dataclass(frozen=True, slots=True)
class Large:
    """The result is ready and this big; it is sent when asked for again."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pending:
    """Not ready yet."""

    state: QueueState = QueueState.ACTIVE
    reason: str | None = None
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """No result; the error says why, and whether asking again may help."""

    error: TinkexError


Outcome = Done | Large | Pending | Trouble


@dataclass(slots=True)
class Patience:
    """Decides how long to wait after each outcome; raises when it is over."""

    outage_seconds: float
    billing_pause_seconds: float
    quick_answers: int = 0
    bad_answers: int = 0
    away_answers: int = 0
    away_since: float | None = None
    billing_since: float | None = None

    def after(self, outcome: Pending | Trouble, lasted: float, now: float, jitter: float) -> float:
        """Seconds to wait before the next poll, given how long this one lasted."""
        if isinstance(outcome, Pending):
            return self._after_pending(outcome, lasted, jitter)
        error = outcome.error
        if error.status == 402:
            return self._after_billing(error, now)
        if is_bad_answer(error):
            self.bad_answers += 1
            if self.bad_answers <= MAX_BAD_ANSWERS:
                return backoff(SOON, self.bad_answers, jitter)
        elif error.retryable:
            return self._after_silence(error, now, jitter)
        raise error

    def _after_billing(self, error: TinkexError, now: float) -> float:
        self.away_since = None
        self.billing_since = now if self.billing_since is None else self.billing_since
        left = self.billing_pause_seconds - (now - self.billing_since)
        if left <= 0.0:
            raise error
        return min(BILLING_WAIT_SECONDS, left)

    def _after_silence(self, error: TinkexError, now: float, jitter: float) -> float:
        self.away_since = now if self.away_since is None else self.away_since
        if now - self.away_since >= self.outage_seconds:
            raise error
        self.away_answers += 1
        told = getattr(error, "retry_after_seconds", None) or 0.0
        return max(told, backoff(_LATER, self.away_answers, jitter))

    def _after_pending(self, outcome: Pending, lasted: float, jitter: float) -> float:
        self.away_since = self.billing_since = None
        self.bad_answers = self.away_answers = 0
        if lasted >= QUICK_SECONDS:
            self.quick_answers = 0
            return outcome.wait_seconds or 0.0
        self.quick_answers += 1
        floor = 0.0 if outcome.state is QueueState.ACTIVE else 1.0
        wait = outcome.wait_seconds or backoff(SOON, self.quick_answers, jitter)
        return max(floor, wait)


def is_bad_answer(error: TinkexError) -> bool:
    """True for answers with which some servers mean "the request failed" and others a hiccup."""
    if not isinstance(error, APIStatusError):
        return False
    if error.should_retry is not None:
        return False
    # A proxy's page of text is a hiccup; a JSON object with a reason is the server speaking.
    has_reason = isinstance(error.body, dict) and parse_error_body(error.body) is not None
    return error.status == 400 or (error.status == 500 and has_reason)


def classify(response: HttpResponse, error_of: Callable[[HttpResponse], TinkexError]) -> Outcome:
    """What one answer to a poll means, in any dialect."""
    if response.status_code == 408:
        return _pending(_object(response), response)
    if not 200 <= response.status_code < 300:
        return Trouble(error_of(response))
    return Done(response) if response.is_proto else _classify_json(response)


def _classify_json(response: HttpResponse) -> Outcome:
    body = _object(response)
    status = body.get("status")
    if body.get("type") == "try_again" or status in {"pending", "running", "queued"}:
        return _pending(body, response)
    if status == "complete_metadata":
        size = body.get("response_payload_size")
        return Large(max(0, size) if isinstance(size, int) else 0)
    if status == "failed" or ("error" in body and body["error"] is not None):
        return Trouble(_failure(body))
    if status is None or status in DONE_WORDS:
        return Done(response)
    text = f"The server gave a result the status {status!r}, which nobody knows"
    return Trouble(APIResponseValidationError(response, body, text))


def _object(response: HttpResponse) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {}


def _pending(body: dict[str, Any], response: HttpResponse) -> Pending:
    millis = body.get("retry_after_ms")
    told = believed(millis / 1000.0) if isinstance(millis, int | float) else None
    wait = told if told is not None else retry_after(response.headers)
    state = QueueState.parse(body["queue_state"]) if "queue_state" in body else QueueState.ACTIVE
    return Pending(state, body.get("queue_state_reason"), wait)


def _failure(body: dict[str, Any]) -> RequestFailedError:
    fault = parse_error_body(body)
    if fault is None:
        return RequestFailedError("The server says the request failed, without a reason")
    return RequestFailedError(
        fault.message,
        str(body.get("request_id") or ""),
        fault.category or RequestErrorCategory.Unknown,
    )


@dataclass(slots=True)
class Poller:
    """Waits for promises on behalf of one client."""

    transport: Transport
    watch: QueueWatch
    response_budget: ByteBudget
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Any] = asyncio.sleep

    async def result(
        self, endpoint: Endpoint[Any, Any], request_id: str, submit_seconds: float, kind: str = ""
    ) -> Any:
        """The decoded result of a promise; raises when it failed or cannot be had."""
        config = self.transport.config
        patience = Patience(config.outage_seconds, self.transport.billing_pause_seconds)
        ends_at = self.clock() + (config.poll_timeout_seconds or float("inf"))
        iteration = 0
        while True:
            started = self.clock()
            headers = _poll_headers(endpoint, kind, iteration, submit_seconds)
            seconds = min(config.poll_request_seconds, ends_at - started)
            outcome = await self._poll(request_id, headers, seconds)
            if isinstance(outcome, Done):
                return await self._decode(endpoint, outcome.response)
            iteration += 1
            wait = self._next_wait(patience, outcome, started, request_id)
            if self.clock() + wait >= ends_at:
                limit = config.poll_timeout_seconds
                raise ResultTimeoutError(None, f"{request_id} had no result within {limit:g} s")
            await self.sleep(wait)

    def _next_wait(
        self, patience: Patience, outcome: Outcome, started: float, request_id: str
    ) -> float:
        assert isinstance(outcome, Pending | Trouble)
        if isinstance(outcome, Pending):
            self.watch.see(outcome.state, outcome.reason)
        elif isinstance(outcome.error, RequestFailedError):
            outcome.error.request_id = outcome.error.request_id or request_id
            raise outcome.error
        elif outcome.error.status == 402:
            self.watch.see(QueueState.PAUSED_RATE_LIMIT, str(outcome.error))
        now = self.clock()
        return patience.after(outcome, now - started, now, random.random())

    async def _poll(self, request_id: str, headers: dict[str, str], seconds: float) -> Outcome:
        """Ask once; a large result is fetched when the budget has room for it."""
        outcome = await self._ask(request_id, headers, seconds, allow_metadata=True)
        if not isinstance(outcome, Large):
            return outcome
        async with self.response_budget.reserve(outcome.num_bytes):
            outcome = await self._ask(request_id, headers, seconds, allow_metadata=False)
        if not isinstance(outcome, Large):
            return outcome
        text = f"The server announced the result of {request_id} twice and never sent it"
        return Trouble(APIResponseValidationError(None, None, text))

    async def _ask(
        self, request_id: str, headers: dict[str, str], seconds: float, allow_metadata: bool
    ) -> Outcome:
        self.transport.stopwatch.count("polls")
        message = FutureRetrieveRequest(request_id=request_id, allow_metadata_only=allow_metadata)
        request = outgoing(RETRIEVE_FUTURE, message, headers=headers, timeout_seconds=seconds)
        try:
            response = await self.transport.exchange(request)
        except ConnectTimeoutError as error:
            return Trouble(error)
        except APITimeoutError:
            # A poll that ran into its time limit is a long poll without news.
            return Pending()
        except APIConnectionError as error:
            return Trouble(error)
        return classify(response, self.transport.error_of)

    async def _decode(self, endpoint: Endpoint[Any, Any], response: HttpResponse) -> Any:
        try:
            if len(response.content) > LARGE_BYTES:
                return await asyncio.to_thread(
                    decode_result, endpoint, response.content, response.is_proto
                )
            return decode_result(endpoint, response.content, response.is_proto)
        except (ValueError, msgspec.MsgspecError) as error:
            shown = repr(response.content[:200])
            text = f"The result of {endpoint.name} does not fit the protocol: {error}; got {shown}"
            raise APIResponseValidationError(response, shown, text) from error


def _poll_headers(
    endpoint: Endpoint[Any, Any], kind: str, iteration: int, submit_seconds: float
) -> dict[str, str]:
    headers = {
        "x-tinker-request-iteration": str(iteration),
        "x-tinker-request-type": kind or endpoint.request_type,
    }
    if iteration == 0:
        headers["x-tinker-create-promise-roundtrip-time"] = f"{submit_seconds:.6f}"
    if has_proto_result(endpoint):
        headers["accept"] = PROTO_TYPE
    return headers
