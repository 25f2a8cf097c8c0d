"""Fetching what was promised."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from tinkex import types
from tinkex.errors import RequestErrorCategory
from tinkex.testing.answers import Answer, Refusal, json_answer
from tinkex.testing.calls import Call
from tinkex.testing.promises import Job, JobState
from tinkex.testing.results import announced, outcome, pending
from tinkex.testing.state import Completions, Handler, World
from tinkex.wire.messages import CancelFutureRequest


def retrieve_future(world: World, call: Call) -> Answer | Awaitable[Answer]:
    """The result of a promise; if it is not there yet, wait for it a while."""
    request = world.read(call, types.FutureRetrieveRequest)
    job = _find(world, call, request.request_id)
    if job.is_over:
        return _result(world, call, job, request.allow_metadata_only)
    return _wait_for_result(world, call, job, request.allow_metadata_only)


async def _wait_for_result(world: World, call: Call, job: Job, is_size_enough: bool) -> Answer:
    if job.waiters is None:
        job.waiters = set()
    await world.clock.wait(world.config.long_poll_seconds, job.waiters)
    if not job.is_over:
        return pending(job, world.dialect)
    return _result(world, call, job, is_size_enough)


def _result(world: World, call: Call, job: Job, is_size_enough: bool) -> Answer:
    answer = outcome(job, world.dialect, wants_proto=call.wants_proto)
    return announced(answer) if is_size_enough else answer


def _find(world: World, call: Call, request_id: str) -> Job:
    job = world.promises.find(request_id)
    if job is None and world.promises.was_made(request_id):
        raise Refusal(410, f"promise {request_id!r} has expired")
    if job is None or job.tenant != call.tenant:
        raise Refusal(404, f"future {request_id!r} does not exist")
    return job


async def retrieve_futures(world: World, call: Call) -> Answer:
    """What a sampling client's promises came to since it last asked; waits for news."""
    request = world.read(call, types.FuturesRetrieveRequest)
    target = request.target
    sampling = world.sampler(call.tenant, target.sampling_session_id)
    completions = sampling.completions.setdefault(target.cloned_sampler_id, Completions())
    if completions.num_total <= request.prev_cursor:
        seconds = world.config.long_poll_seconds
        if request.timeout is not None:
            seconds = min(seconds, request.timeout)
        await world.clock.wait(seconds, completions.waiters)
    done = [_completion(world, job) for job in completions.since(request.prev_cursor)]
    return json_answer({"completions": done, "cursor": completions.num_total})


def _completion(world: World, job: Job) -> dict[str, Any]:
    if job.state is JobState.FAILED:
        return {"state": "failed", "request_id": job.request_id}
    num_bytes = len(outcome(job, world.dialect, wants_proto=True).body)
    return {
        "state": "finished",
        "request_id": job.request_id,
        "response_payload_uncompressed_size": num_bytes,
    }


def cancel_future(world: World, call: Call) -> Answer:
    """Give up on a promise that nobody waits for any more."""
    request = world.read(call, CancelFutureRequest)
    job = _find(world, call, request.request_id)
    if not job.is_over:
        job.fail("the request was cancelled", RequestErrorCategory.User)
    return json_answer({})


ROUTES: dict[str, Handler] = {
    "retrieve_future": retrieve_future,
    "retrieve_futures": retrieve_futures,
    "cancel_future": cancel_future,
}
