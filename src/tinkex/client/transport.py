"""Send requests with headers, credentials and retries; turn error responses into exceptions."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import platform
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from tinkex.client.config import Config
from tinkex.client.http import HttpClient, HttpResponse, HttpStream
from tinkex.client.metrics import MetricsRecorder, RequestDone
from tinkex.client.retry import (
    UNREACHABLE_STATUSES,
    RetryPolicy,
    RetryStreak,
    is_unreachable,
    parse_retry_after,
    parse_should_retry,
)
from tinkex.errors import (
    APIError,
    APIResponseValidationError,
    APIStatusError,
    AuthenticationError,
    TinkexError,
    error_class_for,
)
from tinkex.ids import new_id
from tinkex.logs import OncePerMinute, get_logger
from tinkex.settings import package_version
from tinkex.types import ClientConfigResponse
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.endpoints import BodyFormat, Endpoint
from tinkex.wire.messages import Empty
from tinkex.wire.results import parse_error_body

ReplyT = TypeVar("ReplyT")
APIErrorT = TypeVar("APIErrorT", bound=APIError)
logger = get_logger(__name__)

#: The protocol version of this client; servers adapt their responses to it.
WIRE_VERSION = "0.36.0"
JSON_TYPE = "application/json"
PROTO_TYPE = "application/x-protobuf"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRequest:
    """An encoded request; can be sent several times."""

    endpoint: Endpoint[object, object]
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float | None = None


def build_request(
    endpoint: Endpoint[object, object],
    message: object = None,
    *,
    ids: Mapping[str, str] | None = None,
    query: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
) -> OutgoingRequest:
    """Encode a message for an endpoint; `bytes` are sent as they are."""
    path = endpoint.url_path(**(ids or {}))
    params = {name: value for name, value in (query or {}).items() if value is not None}
    if params:
        path += "?" + urlencode(params)
    body: bytes | None = None
    if endpoint.body is not BodyFormat.NONE:
        body = message if isinstance(message, bytes) else encode_json(message or {})
    return OutgoingRequest(
        endpoint=endpoint,
        path=path,
        body=body,
        headers=headers or {},
        timeout_seconds=timeout_seconds,
    )


#: One random id per process plus a counter: a new random id would cost a system call.
_KEY_COUNTER = itertools.count()
_PROCESS_KEY = new_id()


def new_idempotency_key() -> str:
    """Return a key that is unique across requests and processes."""
    return f"tinkex-{_PROCESS_KEY}-{os.getpid()}-{next(_KEY_COUNTER)}"


def _response_of(error: TinkexError) -> HttpResponse:
    assert isinstance(error, APIStatusError)
    response: HttpResponse = error.response
    return response


def _mark_web_page(error: APIErrorT) -> APIErrorT:
    """Mark an error as caused by an HTML response."""
    error.is_web_page = True
    error.hint = "Check base_url=...; a Tinker server answers in JSON."
    return error


class Transport:
    """Sends requests to one server with one credential."""

    def __init__(
        self,
        config: Config,
        http: HttpClient,
        credential: Callable[[], Awaitable[str | None]],
        credential_source: str = "",
        poll_http: HttpClient | None = None,
    ) -> None:
        self.config = config
        self.http = http
        #: Long polls occupy connections, so they use a separate pool.
        self._poll_http = poll_http or http
        self.billing_pause_seconds = 0.0
        self.apply_server_config(ClientConfigResponse())
        self.metrics = MetricsRecorder()
        self.has_contact = False
        self.on_request_done: Callable[[RequestDone], None] | None = None
        self._credential = credential
        self._credential_source = credential_source
        self._headers = base_headers(config)
        self._log_throttle = OncePerMinute()

    def apply_server_config(self, server_config: ClientConfigResponse) -> None:
        """Apply the server's limits, unless the user's config sets them."""
        configured = self.config.billing_pause_seconds
        server_limit = server_config.billing_exception_max_pause_duration_sec
        self.billing_pause_seconds = server_limit if configured is None else configured

    async def call(
        self,
        endpoint: Endpoint[object, ReplyT],
        message: object = None,
        *,
        ids: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
    ) -> ReplyT:
        """Send a message, with retries, and return the typed reply."""
        request = build_request(endpoint, message, ids=ids, query=query, headers=headers)
        return self.decode_reply(endpoint, await self.send_with_retries(request, policy))

    async def send_with_retries(
        self, request: OutgoingRequest, policy: RetryPolicy | None = None
    ) -> HttpResponse:
        """Send until the server accepts the request, rejects it for good, or retries run out."""
        policy = policy or self.policy_for(request.endpoint)
        # The same key on every attempt lets the server recognise a request whose reply was lost.
        key = new_idempotency_key() if request.endpoint.method != "GET" else None
        started = time.monotonic()
        streak = RetryStreak()
        attempt = 0
        while True:
            attempt += 1
            sent_at = time.monotonic()
            try:
                response = await self.send_once(request, attempt - 1, key)
            except TinkexError as error:
                policy = self._policy_after_contact(policy)
                if streak.is_already_applied(request.endpoint.success_after_retry, error):
                    return _response_of(error)
                wait = streak.wait_after(policy, error, sent_at, time.monotonic(), random.random())
                if wait is None:
                    self._emit_request_done(request, error.status, started, attempt)
                    raise
                self._log_retry(request, error, wait, time.monotonic() - started)
                self.metrics.count("retries")
            else:
                self._emit_request_done(request, response.status_code, started, attempt)
                return response
            await asyncio.sleep(wait)

    async def send_once(
        self, request: OutgoingRequest, num_retries: int = 0, idempotency_key: str | None = None
    ) -> HttpResponse:
        """Send once; raises for any status but 2xx."""
        response = await self.send_raw(request, num_retries, idempotency_key)
        if 200 <= response.status_code < 300:
            return response
        error = self.error_from_response(response)
        if error.status == 401 and "x-api-key" in request.headers:
            error.hint = "The server refused the weights access token."
        raise error

    async def send_raw(
        self, request: OutgoingRequest, num_retries: int = 0, idempotency_key: str | None = None
    ) -> HttpResponse:
        """Send once and return the response, whatever its status."""
        endpoint = request.endpoint
        seconds = request.timeout_seconds or self.timeout_for(endpoint)
        headers = self._headers | {
            "x-stainless-retry-count": str(num_retries),
            "x-stainless-read-timeout": f"{seconds:g}",
        }
        if request.body is not None:
            headers["content-type"] = JSON_TYPE
        if idempotency_key is not None:
            headers["x-idempotency-key"] = idempotency_key
        credential = await self._credential()
        if credential is not None:
            headers["x-api-key"] = credential
        headers |= request.headers
        self.metrics.count("requests")
        self.metrics.count("bytes_sent", len(request.body or b""))
        http = self._poll_http if endpoint.is_long_poll else self.http
        url = self.config.base_url + request.path
        response = await http.send(endpoint.method, url, headers, request.body, seconds)
        self.metrics.count("bytes_received", len(response.content))
        self.has_contact = self.has_contact or response.status_code < 500
        self._log_deprecation(response)
        return response

    async def headers_for(self, url: str) -> dict[str, str]:
        """Return headers for a plain GET; includes the credential only for this server's URLs."""
        if not url.startswith(self.config.base_url + "/"):
            return {"user-agent": self._headers["user-agent"]}
        credential = await self._credential()
        key = {"x-api-key": credential} if credential is not None else {}
        return self._headers | {"accept": "*/*"} | key

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_seconds: float,
        body: bytes | None = None,
    ) -> AsyncIterator[HttpStream]:
        """Stream the response to a GET, or with `body` to a POST."""
        all_headers = await self.headers_for(url) | dict(headers)
        async with self.http.stream(url, all_headers, timeout_seconds, body) as stream:
            yield stream

    def decode_reply(self, endpoint: Endpoint[object, ReplyT], response: HttpResponse) -> ReplyT:
        """Decode a reply; raises APIResponseValidationError if it does not match the protocol."""
        if endpoint.reply is Empty:
            return endpoint.reply()
        try:
            return decode_json(response.content, endpoint.reply)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if response.is_web_page:
                page = APIResponseValidationError(response, None, self._describe_web_page(response))
                raise _mark_web_page(page) from error
            excerpt = response.text[:200]
            raise APIResponseValidationError(
                response,
                excerpt,
                f"Invalid response to {endpoint.name}: {error}; got {excerpt!r}",
            ) from error

    def error_from_response(self, response: HttpResponse) -> APIStatusError:
        """Return the typed exception for an error response."""
        try:
            body: object = response.json()
        except ValueError:
            body = response.text
        should_retry, is_page = parse_should_retry(response.headers), response.is_web_page
        fault = None if is_page else parse_error_body(body)
        text = (fault.message if fault else str(body))[:500] or "empty response"
        if is_page:
            text = self._describe_web_page(response)
        error = error_class_for(response.status_code)(
            f"Error code: {response.status_code} - {text}",
            response,
            body,
            category=fault.category if fault else None,
            should_retry=False if is_page and response.status_code == 501 else should_retry,
            retry_after_seconds=parse_retry_after(response.headers),
        )
        if isinstance(error, AuthenticationError) and self._credential_source:
            error.hint = f"The server refused the key from {self._credential_source}."
        return _mark_web_page(error) if is_page else error

    def _describe_web_page(self, response: HttpResponse) -> str:
        """Describe an HTML response in one sentence, without quoting the page."""
        status, url = response.status_code, self.config.base_url
        if status in UNREACHABLE_STATUSES:
            return f"{url} is unavailable: a proxy in front of it answered with a web page"
        return f"{url} is not a Tinker server: it answered with a web page (status {status})"

    def policy_for(self, endpoint: Endpoint[object, object]) -> RetryPolicy:
        """Return the retry policy of an endpoint."""
        config = self.config
        return RetryPolicy(
            max_retries=config.max_retries,
            outage_seconds=(
                config.outage_seconds if self.has_contact else config.first_contact_seconds
            ),
            retries_conflict=endpoint.retries_conflict,
            billing_pause_seconds=self.billing_pause_seconds if endpoint.result_type else 0.0,
            has_contact=self.has_contact,
        )

    def _policy_after_contact(self, policy: RetryPolicy) -> RetryPolicy:
        """Return the policy for a known server, once the server has responded."""
        if policy.has_contact or not self.has_contact:
            return policy
        outage_seconds = self.config.outage_seconds
        return dataclasses.replace(policy, has_contact=True, outage_seconds=outage_seconds)

    def timeout_for(self, endpoint: Endpoint[object, object]) -> float:
        """Return the request timeout: the configured one, or the endpoint's if it is shorter."""
        config = self.config
        configured = (
            config.poll_request_seconds if endpoint.is_long_poll else config.timeout_seconds
        )
        return min(endpoint.timeout_seconds or config.timeout_seconds, configured)

    def _log_retry(
        self, request: OutgoingRequest, error: TinkexError, wait: float, elapsed: float
    ) -> None:
        name = request.endpoint.name
        logger.debug("%s failed (%s); retrying in %.1f s", name, error, wait)
        if error.status == 402 and self._log_throttle.allows("billing"):
            logger.warning("Paused by a billing issue: %s", error)
        elif is_unreachable(error) and elapsed + wait > 2.0 and self._log_throttle.allows("outage"):
            logger.warning("%s; retrying", error)

    def _emit_request_done(
        self, request: OutgoingRequest, status: int | None, started: float, attempts: int
    ) -> None:
        if self.on_request_done is not None:
            self.on_request_done(
                RequestDone(
                    endpoint=request.endpoint.name,
                    status=status,
                    seconds=time.monotonic() - started,
                    num_retries=attempts - 1,
                )
            )

    def _log_deprecation(self, response: HttpResponse) -> None:
        note = response.headers.get("x-deprecation-note")
        if note and self._log_throttle.allows(note):
            is_error = response.headers.get("x-deprecation-level", "").lower() == "error"
            (logger.error if is_error else logger.warning)("Message from the server: %s", note)


def base_headers(config: Config) -> dict[str, str]:
    """Return the headers that all requests share."""
    env = config.environment
    runtime = f"python {platform.python_version()}; {platform.system()}"
    headers = {
        "accept": JSON_TYPE,
        "user-agent": f"tinkex/{package_version()} ({runtime})",
        "x-sdk-version": WIRE_VERSION,
    }
    if env.access_client_id and env.access_client_secret:
        headers["cf-access-client-id"] = env.access_client_id
        headers["cf-access-client-secret"] = env.access_client_secret
    return headers | {name.lower(): value for name, value in config.headers.items()}
