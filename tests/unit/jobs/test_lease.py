"""An expired lease is detected by the contender's monotonic clock."""

from __future__ import annotations

from tinkex.jobs.lease import LEASE_SECONDS, LeaseWatch
from tinkex.store.coordination import LeaseState


def test_a_lease_that_does_not_change_for_its_length_has_expired() -> None:
    watch, state = LeaseWatch(), LeaseState(epoch=3, until=1e12)
    assert watch.expired_state(500.0) is None
    watch.observe(state, 500.0)
    assert watch.expired_state(500.0 + LEASE_SECONDS - 1) is None
    watch.observe(state, 515.0)
    assert watch.expired_state(500.0 + LEASE_SECONDS) == state


def test_a_lease_that_is_renewed_does_not_expire_although_its_timestamp_is_past() -> None:
    watch = LeaseWatch()
    for second in range(0, 200, 5):
        watch.observe(LeaseState(epoch=3, until=1.0 + second), float(second))
        assert watch.expired_state(second + 5.0) is None
