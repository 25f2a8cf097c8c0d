"""Responses: paths, links, and unions with unknown members."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.types import (
    BillingUsageEvent,
    ClientConfigResponse,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    ClientSessionFinishSuccess,
    FutureFailed,
    FutureFinished,
    FuturesRetrieveResponse,
    ParsedCheckpointTinkerPath,
    RequestFailedResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    SessionActive,
    SessionFailed,
    SessionFailedRequestReason,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSummary,
    StorageBillingEvent,
    TelemetrySendRequest,
    UnknownBillingEvent,
    UserSearchOwner,
)
from tinkex.types.base import decode_hook

SUMMARY = {
    "session_id": "s",
    "created_at": "2026-01-02T03:04:05Z",
    "owner": "o",
    "project_id": "p",
    "checkpoints_count": 0,
}
FAILED = {
    "type": "failed",
    "category": "user",
    "reason": {"type": "request", "request_id": "r", "request_type": "Sample"},
    "message": "no",
}
EVENT = {"bucket_start": "2026-01-02T03:00:00Z", "bucket_end": "2026-01-02T04:00:00Z"}


def decode(message: Any, kind: Any) -> Any:
    """Decode like the transport."""
    return msgspec.json.decode(msgspec.json.encode(message), type=kind, dec_hook=decode_hook)


def test_tinker_path_is_parsed() -> None:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path("tinker://s:train:0/sampler_weights/1")
    assert (parsed.training_run_id, parsed.checkpoint_type) == ("s:train:0", "sampler")
    assert parsed.checkpoint_id == "sampler_weights/1"
    assert parsed.tinker_path == "tinker://s:train:0/sampler_weights/1"


def test_invalid_tinker_path_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Invalid tinker path: 'tinker:///weights/x'"):
        ParsedCheckpointTinkerPath.from_tinker_path("tinker:///weights/x")


def test_checkpoints_have_pages_in_the_console() -> None:
    saved = SaveWeightsResponse(path="tinker://s:train:0/weights/1")
    assert saved.get_console_url() == (
        "https://tinker.thinkingmachines.ai/checkpoints/s%3Atrain%3A0/weights%2F1"
    )
    sampler = SaveWeightsForSamplerResponse(path="tinker://r/sampler_weights/1")
    assert sampler.get_console_url().endswith("/checkpoints/r/sampler_weights%2F1")
    assert sampler.get_playground_url() == (
        "https://tinker.thinkingmachines.ai/playground"
        "?mode=checkpoint&checkpoint=tinker%3A%2F%2Fr%2Fsampler_weights%2F1"
    )


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, None),
        ({"type": "active"}, SessionActive()),
        (
            FAILED,
            SessionFailed(
                category="user",
                reason=SessionFailedRequestReason(request_id="r", request_type="Sample"),
                message="no",
            ),
        ),
        (
            {"type": "client_finished", "reason": {"type": "success"}},
            ClientSessionFinished(reason=ClientSessionFinishSuccess()),
        ),
        ({"type": "hibernating"}, None),
        ({**FAILED, "reason": {"type": "meteor"}}, None),
        ({**FAILED, "category": "cosmic"}, None),
    ],
)
def test_unknown_status_is_none(status: Any, expected: Any) -> None:
    summary = decode({**SUMMARY, "status": status}, SessionSummary)
    assert summary.status == expected
    assert summary.session_id == "s"
    assert SessionSummary.model_validate(summary.model_dump()) == summary


def test_status_must_be_an_object() -> None:
    with pytest.raises(msgspec.ValidationError, match="status is 'active'; expected dict"):
        decode({**SUMMARY, "status": "active"}, SessionSummary)


def test_completions_in_unknown_state_are_omitted() -> None:
    answer = decode(
        {
            "completions": [
                {"state": "finished", "request_id": "a", "response_payload_uncompressed_size": 9},
                {"state": "postponed", "request_id": "b"},
                {"state": "failed", "request_id": "c"},
            ],
            "cursor": 5,
        },
        FuturesRetrieveResponse,
    )
    finished = FutureFinished(request_id="a", response_payload_uncompressed_size=9)
    assert answer.completions == [finished, FutureFailed(request_id="c")]
    assert (finished.state, FutureFailed.state) == ("finished", "failed")


def test_unknown_kinds_of_usage_are_preserved() -> None:
    known = decode(
        {**EVENT, "event_info": {"type": "storage", "gigabyte_hours": 2}}, BillingUsageEvent
    )
    assert known.event_info == StorageBillingEvent(gigabyte_hours=2.0)
    unknown = decode({**EVENT, "event_info": {"type": "gpu", "hours": 2}}, BillingUsageEvent)
    assert unknown.event_info == UnknownBillingEvent(type="gpu", hours=2)
    with pytest.raises(msgspec.ValidationError, match="event_info needs 'gigabyte_hours'"):
        decode({**EVENT, "event_info": {"type": "storage"}}, BillingUsageEvent)


def test_empty_config_has_all_defaults() -> None:
    config = decode({}, ClientConfigResponse)
    assert config == ClientConfigResponse()
    assert (config.fwdbwd_max_chunk_len, config.sample_max_concurrent_requests) == (1024, 2000)
    assert config.sample_dispatch_bytes_semaphore_size == 10485760


def test_failures_carry_a_category() -> None:
    failed = decode({"error": "no", "category": "user"}, RequestFailedResponse)
    assert failed.category is RequestErrorCategory.User


def test_search_request_is_validated() -> None:
    request = SessionSearchRequest(
        owner=UserSearchOwner(owner_urns=["u"]),
        statuses=[ClientFinishedSessionStatusQuery(reasons=["errored"])],
        cursor=SessionSearchCursor(
            last_created_at=datetime(2026, 1, 2, tzinfo=UTC), last_session_id="s"
        ),
    )
    assert request.model_dump(mode="json", exclude_none=True) == {
        "user_metadata": {},
        "owner": {"type": "user", "owner_urns": ["u"]},
        "statuses": [{"type": "client_finished", "reasons": ["errored"]}],
        "limit": 50,
        "cursor": {"last_created_at": "2026-01-02T00:00:00Z", "last_session_id": "s"},
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"statuses": []}, r"statuses is \[\]; expected list of length >= 1"),
        ({"display_name": ""}, "display_name is ''; expected str of length >= 1"),
        ({"limit": 0}, "limit is 0; expected int >= 1"),
        ({"owner": {"type": "user", "owner_urns": ["u"] * 11}}, "length <= 10"),
        (
            {"cursor": {"last_created_at": "2026-01-02T00:00:00", "last_session_id": "s"}},
            "timezone",
        ),
    ],
)
def test_invalid_search_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SessionSearchRequest(**wrong)


def test_telemetry_events_are_decoded_by_tag() -> None:
    common = {"event_id": "e", "event_session_index": 0, "severity": "INFO"}
    common["timestamp"] = "2026-01-02T03:04:05Z"
    request = decode(
        {
            "events": [
                {"event": "SESSION_START", **common},
                {"event": "SESSION_END", "duration": "PT1S", **common},
                {"event": "UNHANDLED_EXCEPTION", "error_type": "E", "error_message": "m", **common},
                {"event": "GENERIC_EVENT", "event_name": "n", **common},
            ],
            "platform": "Linux",
            "sdk_version": "1",
            "session_id": "s",
            "process_uuid": "u",
        },
        TelemetrySendRequest,
    )
    assert [type(event).__name__ for event in request.events] == [
        "SessionStartEvent",
        "SessionEndEvent",
        "UnhandledExceptionEvent",
        "GenericEvent",
    ]
    assert request.model_dump(mode="json")["events"][0]["event"] == "SESSION_START"
