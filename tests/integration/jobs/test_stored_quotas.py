"""The worker checks storage quotas again, because many saves may be queued at once."""

from __future__ import annotations

from pathlib import Path

from tests.integration.jobs.conftest import WorkerHarness
from tinkex.jobs.quotas import QuotaChecks
from tinkex.store.quotas import Quotas


def test_queued_saves_respect_storage_quota(tmp_path: Path) -> None:
    harness = WorkerHarness(tmp_path, quotas=QuotaChecks(Quotas(checkpoints=2)))
    try:
        tenant = harness.tenant()
        run_id = harness.model(tenant, harness.session(tenant))
        waiting = [harness.save(run_id, seq, f"c{seq}") for seq in range(1, 6)]
        harness.start()
        errors = [harness.outcome(job).job.error for job in waiting]
        assert errors[:2] == [None, None]
        assert all("2 of 2 checkpoints" in str(error) for error in errors[2:])
        harness.result(harness.save(run_id, 6, "c1", overwrite=True))
    finally:
        harness.close()


def test_checkpoint_over_quota_leaves_no_files(tmp_path: Path) -> None:
    harness = WorkerHarness(tmp_path, quotas=QuotaChecks(Quotas(stored_bytes=10)))
    try:
        harness.start()
        tenant = harness.tenant()
        run_id = harness.model(tenant, harness.session(tenant))
        job = harness.outcome(harness.save(run_id, 1, "a")).job
        assert job.category == "user"
        assert "0 of 10 bytes of checkpoints, and this one has" in str(job.error)
        assert list(harness.home.checkpoints.iterdir()) == []
    finally:
        harness.close()
