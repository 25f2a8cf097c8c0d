"""Curves, CSV files and actions of the pages over HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.integration.server.dashboard.conftest import DEFAULT_KEY, DashboardSetup
from tests.integration.server.dashboard.test_page_session import LOCAL, csrf_token
from tests.support.dashboard_browser import add_run, add_session, add_updates
from tests.support.server_harness import KEY, OTHER_KEY
from tinkex.server.dashboard.queries import PageCache
from tinkex.store import jobs, runs, schema, steps
from tinkex.store.records import RunRecord


@pytest.fixture
def run(dashboard: DashboardSetup) -> RunRecord:
    """A run of the default tenant with three steps."""
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    add_updates(dashboard.harness, run, 4.0, 3.0, 1.0)
    return run


def curves(dashboard: DashboardSetup, query: str, key: str = DEFAULT_KEY, **headers: str) -> Any:
    """Request curves with a key."""
    sent = {"X-API-Key": key, **headers}
    return dashboard.local.get(f"/page/curves?{query}", headers=sent)


def metrics_of(answer: httpx.Response) -> dict[str, Any]:
    reply: dict[str, Any] = answer.json()["runs"][0]["metrics"]
    return reply


def test_curves_grow_with_steps(dashboard: DashboardSetup, run: RunRecord) -> None:
    first = curves(dashboard, f"run={run.id}")
    add_updates(dashboard.harness, run, 0.5)
    second = curves(dashboard, f"run={run.id}")

    assert first.json()["metrics"] == ["loss", "tokens_per_second"]
    assert metrics_of(first)["loss"] == {"steps": [1, 2, 3], "values": [4.0, 3.0, 1.0]}
    assert metrics_of(second)["loss"] == {"steps": [1, 2, 3, 4], "values": [4.0, 3.0, 1.0, 0.5]}
    assert first.headers["cache-control"] == "no-store"


def test_late_metrics_appear(dashboard: DashboardSetup, run: RunRecord) -> None:
    before = curves(dashboard, f"run={run.id}")
    newest = sa.select(sa.func.max(schema.steps.c.no)).scalar_subquery()
    place = sa.update(schema.steps).where(schema.steps.c.no == newest).values(position=6)
    dashboard.harness.write(lambda db: db.execute(place))
    dashboard.harness.write(
        lambda db: steps.add_metrics(db, run.id, 6, {"eval_loss": 2.0, "custom": 7.0})
    )
    after = curves(dashboard, f"run={run.id}&metric=custom")

    assert "custom" not in before.json()["metrics"]
    assert "eval_loss" in after.json()["metrics"]
    assert metrics_of(after) == {"custom": {"steps": [3], "values": [7.0]}}


def test_unchanged_curves_are_not_sent_again(dashboard: DashboardSetup, run: RunRecord) -> None:
    tag = curves(dashboard, f"run={run.id}").headers["etag"]

    again = curves(dashboard, f"run={run.id}", **{"If-None-Match": tag})
    add_updates(dashboard.harness, run, 0.5)
    changed = curves(dashboard, f"run={run.id}", **{"If-None-Match": tag})

    assert (again.status_code, again.content) == (304, b"")
    assert changed.status_code == 200


def test_long_curves_are_downsampled_and_zoomed(dashboard: DashboardSetup) -> None:
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    add_updates(dashboard.harness, run, *(float(number % 7) for number in range(3000)))

    whole = metrics_of(curves(dashboard, f"run={run.id}&metric=loss"))["loss"]
    part = metrics_of(curves(dashboard, f"run={run.id}&metric=loss&first=100&last=110"))["loss"]

    assert len(whole["steps"]) <= 1000
    assert (whole["steps"][0], whole["steps"][-1]) == (1, 3000)
    assert part["steps"] == list(range(99, 112))


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 422),
        ("run=", 422),
        ("run=nothing:train:0", 404),
        ("&".join(f"run=r:train:{number}" for number in range(13)), 422),
        ("run={run}&first=x", 422),
        ("run={run}&" + "metric=a&" * 600, 422),
    ],
)
def test_invalid_queries_are_refused(
    dashboard: DashboardSetup, run: RunRecord, query: str, status: int
) -> None:
    answer = curves(dashboard, query.replace("{run}", run.id))

    assert answer.status_code == status
    assert answer.json()["error"]


def test_curves_of_other_tenants_are_hidden(dashboard: DashboardSetup, run: RunRecord) -> None:
    assert curves(dashboard, f"run={run.id}", key=KEY).status_code == 404
    assert curves(dashboard, f"run={run.id}", key="tml-wrong").status_code == 401
    assert dashboard.local.get(f"/page/curves?run={run.id}").status_code == 401
    stranger = replace(dashboard.local, peer="10.0.0.1")
    assert stranger.get(f"/runs/{run.id}/metrics.csv").status_code == 404
    stranger.post("/login", key=OTHER_KEY)
    assert stranger.get(f"/runs/{run.id}/metrics.csv").status_code == 404


def test_csv_is_downloaded(dashboard: DashboardSetup, run: RunRecord) -> None:
    answer = dashboard.local.get(f"/runs/{run.id}/metrics.csv")

    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="metrics.csv"'
    assert answer.text.splitlines()[0] == "step,loss,tokens_per_second"
    assert len(answer.text.splitlines()) == 4


def open_states(dashboard: DashboardSetup, job_ids: list[str]) -> list[bool]:
    found = [dashboard.harness.read(lambda db, each=each: jobs.find(db, each)) for each in job_ids]
    return [not (job.is_finished or job.cancelled_at is not None) for job in found]


def test_cancel_ends_passes_and_samples_of_the_run(
    dashboard: DashboardSetup, run: RunRecord
) -> None:
    harness = dashboard.harness
    own = {"tenant_id": run.tenant_id, "session_id": run.session_id}
    mine = [
        harness.submit_job("forward_backward", run_id=run.id, **own).id,
        harness.submit_job("asample", sampler_id="s", **own).id,
    ]
    step = harness.submit_job("optim_step", run_id=run.id, **own).id
    other = harness.submit_job("asample", tenant_id=run.tenant_id, sampler_id="s").id
    path = f"/page/runs/{run.id}/cancel"
    headers = {**LOCAL, "X-CSRF-Token": csrf_token(dashboard.local)}

    for refused, status in (({}, 401), ({**headers, "Origin": "http://evil.example"}, 403)):
        answer = dashboard.local.get(path, method="POST", headers=refused)
        assert answer.status_code == status
    foreign = dashboard.local.get(path, method="POST", headers={"X-API-Key": KEY})
    assert foreign.status_code == 404
    assert all(open_states(dashboard, [*mine, step, other]))

    answer = dashboard.local.get(path, method="POST", headers=headers)

    assert answer.json() == {"num_open": 3, "num_cancelled": 2}
    assert open_states(dashboard, [*mine, step, other]) == [False, False, True, True]


def test_run_page_offers_to_cancel_open_jobs(dashboard: DashboardSetup, run: RunRecord) -> None:
    assert 'data-action="cancel-run"' not in dashboard.local.get(f"/runs/{run.id}").text
    own = {"tenant_id": run.tenant_id, "session_id": run.session_id, "run_id": run.id}
    dashboard.harness.submit_job("forward_backward", **own)
    assert "Cancel 1 unfinished job<" in dashboard.local.get(f"/runs/{run.id}").text


def put_tags(dashboard: DashboardSetup, run: RunRecord, tags: object, **headers: str) -> int:
    path = f"/api/v1/training_runs/{run.id}/tags"
    answer = dashboard.local.get(path, method="PUT", json={"tags": tags}, headers=headers)
    return answer.status_code


def test_tags_are_replaced(dashboard: DashboardSetup, run: RunRecord) -> None:
    headers = {**LOCAL, "X-CSRF-Token": csrf_token(dashboard.local)}

    assert put_tags(dashboard, run, [" one ", "two", "one"], **headers) == 200
    found = dashboard.harness.read(lambda db: runs.find(db, run.id))
    assert found.user_metadata["tags"] == ["one", "two"]
    assert put_tags(dashboard, run, [], **headers) == 200
    assert dashboard.harness.read(lambda db: runs.find(db, run.id)).user_metadata is None


@pytest.mark.parametrize(
    "tags", [[""], ["x" * 41], ["a\nb"], [str(n) for n in range(17)], "x", [1]]
)
def test_invalid_tags_are_refused(dashboard: DashboardSetup, run: RunRecord, tags: object) -> None:
    headers = {**LOCAL, "X-CSRF-Token": csrf_token(dashboard.local)}

    assert put_tags(dashboard, run, tags, **headers) == 422
    assert put_tags(dashboard, run, ["x"], **{"X-API-Key": KEY}) == 404
    assert put_tags(dashboard, run, ["x"], **LOCAL) == 401


def test_cached_curves_agree_with_new_ones(dashboard: DashboardSetup, run: RunRecord) -> None:
    table = schema.steps
    # So old that their metrics cannot change any more, and they are cached.
    settle = sa.update(table).values(finished_at=table.c.finished_at - 3600)
    dashboard.harness.write(lambda db: db.execute(settle))
    curves(dashboard, f"run={run.id}")
    add_updates(dashboard.harness, run, 0.5, 0.25)

    cached = curves(dashboard, f"run={run.id}&metric=loss").json()
    dashboard.harness.client.app.state.page_cache = PageCache()

    assert cached == curves(dashboard, f"run={run.id}&metric=loss").json()
    assert cached["runs"][0]["metrics"]["loss"]["steps"] == [1, 2, 3, 4, 5]


def test_deleted_steps_leave_the_curves(dashboard: DashboardSetup, run: RunRecord) -> None:
    table = schema.steps
    settle = sa.update(table).values(finished_at=table.c.finished_at - 3600)
    dashboard.harness.write(lambda db: db.execute(settle))
    curves(dashboard, f"run={run.id}")
    oldest = sa.select(table.c.no).order_by(table.c.no).limit(3)
    numbers = dashboard.harness.read(lambda db: list(db.scalars(oldest)))
    delete = sa.delete(table).where(table.c.no.in_(numbers))
    dashboard.harness.write(lambda db: db.execute(delete))

    assert metrics_of(curves(dashboard, f"run={run.id}"))["loss"]["steps"] == [2, 3]
