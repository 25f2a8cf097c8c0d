"""Places and outages: pure decisions."""

from __future__ import annotations

import pytest

from tinkex.checkpoint.places import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    BlobPending,
    BlobsUnavailable,
    OutageGate,
    new_place,
    payload_place,
    retry_seconds,
)


def test_no_place_is_used_twice() -> None:
    places = {new_place("snapshots", "session:train:0") for _ in range(100)}
    assert len(places) == 100
    assert all(place.startswith("snapshots/session_train_0/") for place in places)
    assert payload_place(b"x") != payload_place(b"x")
    assert payload_place(b"x").split("/")[1] == payload_place(b"x").split("/")[1]


def test_gate_closes_for_longer_with_every_failure() -> None:
    gate, now, pauses = OutageGate(), 100.0, []
    for _ in range(8):
        assert gate.record_failure("away", now) == (not pauses)
        end = now
        while True:
            end += 0.25
            try:
                gate.check(end)
                break
            except BlobsUnavailable as error:
                assert error.message == "away"
        pauses.append(end - now)
        now = end
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_gate_opens_with_a_success() -> None:
    gate = OutageGate()
    assert not gate.record_success()
    gate.record_failure("away", 0.0)
    with pytest.raises(BlobsUnavailable):
        gate.check(0.1)
    assert gate.record_success()
    gate.check(0.1)


def test_download_is_looked_at_sooner_than_an_outage() -> None:
    assert retry_seconds(BlobPending()) < retry_seconds(BlobsUnavailable())
    assert BlobsUnavailable().retryable
