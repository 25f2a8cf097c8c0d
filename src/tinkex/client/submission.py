"""Submit a job and wait for its result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tinkex import types
from tinkex.client.http import HttpResponse
from tinkex.client.polling import Poller, SubmittedJob
from tinkex.client.retry import RetryPolicy
from tinkex.client.transport import Transport, build_request
from tinkex.errors import APIResponseValidationError
from tinkex.wire.codec import decode_json
from tinkex.wire.endpoints import JobEndpoint
from tinkex.wire.results import decode_result, unwrap_result

ResultT = TypeVar("ResultT")


async def submit_job(
    transport: Transport,
    endpoint: JobEndpoint[object, ResultT],
    message: object,
    *,
    headers: Mapping[str, str] | None = None,
    policy: RetryPolicy | None = None,
    request_type: str = "",
) -> SubmittedJob[ResultT]:
    """Submit a job, with retries, until the server accepts it."""
    started = time.monotonic()
    request = build_request(endpoint, message, headers=headers)
    response = await transport.send_with_retries(request, policy)
    seconds = time.monotonic() - started
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


def _decode_immediate_result(
    endpoint: JobEndpoint[object, ResultT], response: HttpResponse
) -> ResultT:
    """Decode a result; raises ValueError if none of its fields is present, as in {}."""
    result = decode_result(endpoint, response.content, response.is_proto)
    names = set(getattr(endpoint.result_type, "__struct_fields__", ())) - {"type"}
    body = unwrap_result(response.json())
    if names and not (isinstance(body, dict) and names & body.keys()):
        raise ValueError(f"the response has no field of {endpoint.name}")
    return result


async def run_job(
    poller: Poller, endpoint: JobEndpoint[object, ResultT], message: object
) -> ResultT:
    """Submit a job and wait for its result."""
    return await poller.wait(await submit_job(poller.transport, endpoint, message))
