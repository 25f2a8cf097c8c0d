"""Steps, usage, audit events and idempotency keys."""

from __future__ import annotations

import math

from tests.support.store_rows import NOW, add_session, add_tenant, make_step
from tinkex.store import accounting, idempotency, steps
from tinkex.store.database import Database
from tinkex.store.records import AuditRecord


def test_newest_steps_are_returned_in_order(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    inserted = [make_step(session, run_id="r", metrics={"loss": float(i)}) for i in range(5)]
    for step in inserted:
        database.write(lambda db, step=step: steps.insert(db, step))
    database.write(lambda db: steps.insert(db, make_step(session, run_id="other")))
    numbered = database.read(lambda db: steps.list_by_run(db, "r", limit=3))
    assert [step for _, step in numbered] == inserted[2:]
    after = numbered[0][0]
    assert (
        database.read(lambda db: steps.list_by_run(db, "r", limit=9, after_no=after))
        == numbered[1:]
    )
    assert len(database.read(lambda db: steps.list_by_session(db, session.id, limit=4))) == 4


def test_metrics_keep_nan_and_infinity(database: Database) -> None:
    session = add_session(database, add_tenant(database))
    metrics = {"nan": math.nan, "inf": math.inf, "low": -math.inf, "tiny": 5e-324, "big": 1e300}
    database.write(lambda db: steps.insert(db, make_step(session, metrics=metrics)))
    [step] = database.read(lambda db: steps.list_by_session(db, session.id, limit=1))
    assert step.metrics is not None
    assert math.isnan(step.metrics["nan"])
    assert {k: v for k, v in step.metrics.items() if k != "nan"} == {
        k: v for k, v in metrics.items() if k != "nan"
    }
    assert all(isinstance(value, float) for value in step.metrics.values())


def _use(database: Database, kind: str, amount: int, now: float, run_id: str | None = "r") -> None:
    database.write(
        lambda db: accounting.add_usage(
            db,
            tenant_id="t",
            session_id="s",
            run_id=run_id,
            base_model="m",
            kind=kind,
            amount=amount,
            now=now,
        )
    )


def test_usage_is_summed_per_hour(database: Database) -> None:
    hour = accounting.HOUR_SECONDS
    start = NOW - NOW % hour
    _use(database, "training", 5, start)
    _use(database, "training", 3_000_000_000, start + hour - 1)
    _use(database, "training", 7, start + hour)
    _use(database, "sample", 1, start, run_id=None)
    usage = database.read(lambda db: accounting.list_usage(db, "t", start, start + hour))
    assert [(row.kind, row.run_id, row.amount) for row in usage] == [
        ("sample", "", 1),
        ("training", "r", 3_000_000_005),
    ]
    assert {row.hour for row in usage} == {start // hour}
    assert (
        len(database.read(lambda db: accounting.list_usage(db, "t", start, start + hour + 1))) == 3
    )
    assert database.read(lambda db: accounting.list_usage(db, "u", 0, 2 * NOW)) == []
    assert database.read(lambda db: accounting.usage_totals(db, "t", "r")) == {
        "training": 3_000_000_012
    }


def test_audit_events_are_filtered_limited_and_newest_first(database: Database) -> None:
    made = [
        AuditRecord(tenant_id="t", at=NOW + i, event="ab"[i % 2], details={"i": i}, run_id="r")
        for i in range(6)
    ]
    for entry in [*made, AuditRecord(tenant_id="u", at=NOW, event="a", details={})]:
        database.write(lambda db, entry=entry: accounting.insert_audit(db, entry))

    def entries(
        since: float, until: float, events: list[str] | None = None, limit: int = 9
    ) -> list[AuditRecord]:
        return database.read(
            lambda db: accounting.list_audit(
                db, "t", since=since, until=until, events=events, limit=limit
            )
        )

    assert entries(NOW + 1, NOW + 4) == [made[3], made[2], made[1]]
    assert entries(NOW, NOW + 9, ["a"]) == [made[4], made[2], made[0]]
    assert entries(NOW, NOW + 9, limit=2) == [made[5], made[4]]


def test_first_response_of_idempotency_key_is_kept(database: Database) -> None:
    def recall(tenant: str = "t", endpoint: str = "e", key: str = "k") -> str | None:
        return database.read(lambda db: idempotency.find_response(db, tenant, endpoint, key))

    assert recall() is None
    for answer in ("first", "second"):
        database.write(
            lambda db, answer=answer: idempotency.save_response(db, "t", "e", "k", answer, NOW)
        )
    assert recall() == "first"
    assert (recall(tenant="u"), recall(endpoint="f"), recall(key="l")) == (None, None, None)
