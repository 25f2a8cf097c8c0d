"""The worker checks the storage quotas again: many saves may wait at once."""

from __future__ import annotations

from pathlib import Path

from tests.integration.jobs.conftest import House
from tinkex.jobs.quotas import QuotaChecks
from tinkex.store.quotas import Quotas


def test_saves_that_waited_together_do_not_slip_past_a_quota(tmp_path: Path) -> None:
    house = House(tmp_path, quotas=QuotaChecks(Quotas(checkpoints=2)))
    try:
        tenant = house.tenant()
        run_id = house.model(tenant, house.session(tenant))
        waiting = [house.save(run_id, seq, f"c{seq}") for seq in range(1, 6)]
        house.start()
        errors = [house.outcome(job).job.error for job in waiting]
        assert errors[:2] == [None, None]
        assert all("2 of 2 checkpoints" in str(error) for error in errors[2:])
        house.result(house.save(run_id, 6, "c1", overwrite=True))
    finally:
        house.close()


def test_a_checkpoint_larger_than_what_is_left_leaves_no_files(tmp_path: Path) -> None:
    house = House(tmp_path, quotas=QuotaChecks(Quotas(stored_bytes=10)))
    try:
        house.start()
        tenant = house.tenant()
        run_id = house.model(tenant, house.session(tenant))
        found = house.outcome(house.save(run_id, 1, "a")).job
        assert found.category == "user"
        assert "0 of 10 bytes of checkpoints, and this one has" in str(found.error)
        assert list(house.home.checkpoints.iterdir()) == []
    finally:
        house.close()
