"""Submit a job and wait for its result."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tinkex import types
from tinkex.client.http import HttpResponse
from tinkex.client.polling import Poller, SubmittedJob
from tinkex.client.retry import RetryPolicy
from tinkex.client.transport import OutgoingRequest, Transport, build_request
from tinkex.errors import APIResponseValidationError
from tinkex.wire.codec import decode_json
from tinkex.wire.endpoints import Endpoint
from tinkex.wire.results import decode_result, unwrap_result


async def submit_job(
    transport: Transport,
    request: OutgoingRequest,
    policy: RetryPolicy | None = None,
    request_type: str = "",
) -> SubmittedJob:
    """Submit a job, with retries, until the server accepts it."""
    started = time.monotonic()
    response = await transport.send_with_retries(request, policy)
    seconds = time.monotonic() - started
    endpoint = request.endpoint
    try:
        reply = decode_json(response.content, types.UntypedAPIFuture)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # Some servers run small jobs immediately and return the result.
        try:
            result = _decode_immediate_result(endpoint, response)
        except (ValueError, msgspec.MsgspecError):
            excerpt = response.text[:200]
            raise APIResponseValidationError(
                response,
                excerpt,
                f"{endpoint.name} returned neither a future nor a result: {excerpt!r}",
            ) from error
        return SubmittedJob(endpoint=endpoint, submit_seconds=seconds, result=result)
    return SubmittedJob(
        endpoint=endpoint,
        request_id=reply.request_id,
        sequence_ids=reply.sample_sequence_ids,
        submit_seconds=seconds,
        request_type=request_type,
    )


def _decode_immediate_result(endpoint: Endpoint[Any, Any], response: HttpResponse) -> Any:
    """Decode a result; raises ValueError if none of its fields is present, as in {}."""
    result = decode_result(endpoint, response.content, response.is_proto)
    names = set(getattr(endpoint.result_type, "__struct_fields__", ())) - {"type"}
    if names and not names & unwrap_result(response.json()).keys():
        raise ValueError(f"the response has no field of {endpoint.name}")
    return result


async def run_job(poller: Poller, endpoint: Endpoint[Any, Any], message: object) -> Any:
    """Submit a job and wait for its result."""
    return await poller.wait(await submit_job(poller.transport, build_request(endpoint, message)))
