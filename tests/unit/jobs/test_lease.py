"""An expired lease is detected by the contender's monotonic clock."""

from __future__ import annotations

from tinkex.jobs.lease import LEASE_SECONDS, LeaseWatch
from tinkex.store.coordination import LeaseState


def test_unchanged_lease_expires() -> None:
    watch, state = LeaseWatch(), LeaseState(epoch=3, until=1e12)
    assert watch.expired_state(500.0) is None
    watch.observe(state, 500.0)
    assert watch.expired_state(500.0 + LEASE_SECONDS - 1) is None
    watch.observe(state, 515.0)
    assert watch.expired_state(500.0 + LEASE_SECONDS) == state


def test_renewed_lease_does_not_expire_despite_past_timestamp() -> None:
    watch = LeaseWatch()
    for second in range(0, 200, 5):
        watch.observe(LeaseState(epoch=3, until=1.0 + second), float(second))
        assert watch.expired_state(second + 5.0) is None
