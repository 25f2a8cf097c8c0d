"""Faults: planned, matched, used up."""

from __future__ import annotations

import pytest

from tinkex.errors import InvalidInput
from tinkex.testing.calls import Call
from tinkex.testing.faults import Fault, FaultPlan


def call(endpoint: str = "asample", body: bytes = b"", **headers: str) -> Call:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Call(endpoint, "POST", f"/api/v1/{endpoint}", b"limit=2&x=", raw, body, {})


def test_faults_are_used_up_in_order() -> None:
    plan = FaultPlan()
    first, second = Fault(status=500), Fault(status=429)
    plan.add("asample", first, 2, None)
    plan.add("asample", second, 1, None)
    taken = [plan.take(call()) for _ in range(4)]
    assert taken == [first, first, second, None]
    assert plan.is_empty


def test_fault_applies_only_to_matching_calls() -> None:
    plan = FaultPlan()
    plan.add("asample", Fault(status=500), 1, lambda seen: seen.body == b"{}")
    assert plan.take(call("optim_step", b"{}")) is None
    assert plan.take(call(body=b"[]")) is None
    assert plan.take(call(body=b"{}")) == Fault(status=500)


def test_fault_without_count_lasts_until_cleared() -> None:
    plan = FaultPlan()
    plan.add("asample", Fault(drop=True), None, None)
    assert all(plan.take(call()) for _ in range(5))
    plan.clear()
    assert plan.is_empty


def test_fault_response_has_status_headers_and_body() -> None:
    response = Fault(status=429, headers={"Retry-After": "1"}, body={"detail": "slow"}).response()
    assert (response.status, response.body) == (429, b'{"detail":"slow"}')
    assert (b"retry-after", b"1") in response.headers
    assert (b"content-type", b"application/json") in response.headers
    raw = Fault(status=200, body=b"<html>", headers={"content-type": "text/html"}).response()
    assert (raw.body, raw.headers) == (b"<html>", [(b"content-type", b"text/html")])
    assert Fault(status=400).response().body == b""


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"status": 99}, "status is 99"),
        ({"body": {"a": 1}}, "body needs a status"),
        ({"delay_seconds": -1.0}, "delay_seconds is -1.0"),
    ],
)
def test_invalid_fault_is_rejected(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Fault(**fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="times is 0"):
        FaultPlan().add("asample", Fault(), 0, None)
