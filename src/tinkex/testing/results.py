"""How the outcome of a promise is worded, in each dialect."""

from __future__ import annotations

from tinkex.errors import RequestErrorCategory
from tinkex.testing.answers import JSON_TYPE, Answer, json_answer, proto_answer
from tinkex.testing.dialects import Dialect
from tinkex.testing.promises import Job, JobState
from tinkex.types import ForwardBackwardOutput, SampleResponse
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import encode_forward_backward_output, encode_sample_response
from tinkex.wire.results import make_error_body

#: Results above this may be announced by their size first.
MAX_INLINE_BYTES = 256 * 1024


def outcome(job: Job, dialect: Dialect, *, wants_proto: bool) -> Answer:
    """The answer about a promise that is over; encoded once."""
    is_proto = wants_proto and dialect.writes_proto
    if job.answers is None:
        job.answers = {}
    if is_proto not in job.answers:
        is_failure = job.state is JobState.FAILED
        job.answers[is_proto] = _failure(job, dialect) if is_failure else _success(job, is_proto)
    return job.answers[is_proto]


def announced(answer: Answer) -> Answer:
    """The size of a large result instead of the result; small ones stay as they are."""
    if answer.status != 200 or len(answer.body) <= MAX_INLINE_BYTES:
        return answer
    return json_answer({"status": "complete_metadata", "response_payload_size": len(answer.body)})


def pending(job: Job, dialect: Dialect) -> Answer:
    """The answer about a promise that is not over."""
    if dialect.pending_is_ok:
        return json_answer(
            {"type": "try_again", "request_id": job.request_id, "queue_state": "active"}
        )
    if dialect.fails_by_status:
        return json_answer({"detail": "Timeout waiting for result"}, 408)
    return json_answer({"request_id": job.request_id, "queue_state": "active"}, 408)


def _failure(job: Job, dialect: Dialect) -> Answer:
    if not dialect.fails_by_status:
        return json_answer(make_error_body(job.error, job.category))
    if job.category is RequestErrorCategory.User:
        return json_answer({"detail": job.error}, 400)
    return json_answer({"detail": "Unknown error"}, 500)


def _success(job: Job, is_proto: bool) -> Answer:
    result = job.result
    if not isinstance(result, SampleResponse | ForwardBackwardOutput):
        return json_answer(result)
    if not is_proto:
        return Answer(200, encode_json(result), [JSON_TYPE])
    if isinstance(result, SampleResponse):
        return proto_answer(encode_sample_response(result))
    return proto_answer(encode_forward_backward_output(result))
