from __future__ import annotations

import html
import re
import time
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.server.dashboard.conftest import DashboardSetup
from tests.support.dashboard_browser import add_run, add_session, add_updates
from tinkex.errors import StoreBusy
from tinkex.ids import new_id
from tinkex.jobs.wakeup import WakeupListener
from tinkex.server.dashboard import queries
from tinkex.store import checkpoints, jobs, quotas
from tinkex.store.database import Database
from tinkex.store.records import CheckpointRecord, RunRecord

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>{{7*7}}&quot;\' \u202e'


def text_of(page: str) -> str:
    """The visible text of a page."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def attribute_names(page: str) -> set[str]:
    """The names of all attributes of a page, as a browser reads it."""
    found: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.update(name for name, _ in attrs)

    Reader().feed(page)
    return found


def cells(page: str, run_id: str) -> dict[str, str]:
    """The cells of a run's row by label."""
    row = page.partition(f'<code class="id">{run_id}</code>')[2].partition("</tr>")[0]
    matches = re.findall(r'<td[^>]*data-label="([^"]+)">(.*?)</td>', row, re.DOTALL)
    return {name: text_of(content) for name, content in matches}


def add_checkpoint(
    dashboard: DashboardSetup, run: RunRecord, name: str, **changes: Any
) -> CheckpointRecord:
    values: dict[str, Any] = {
        "id": new_id(),
        "tenant_id": run.tenant_id,
        "session_id": run.session_id,
        "project_id": "default",
        "run_id": run.id,
        "segment": "weights",
        "name": name,
        "base_model": run.base_model,
        "spec": {},
        "size_bytes": 123_456,
        "created_at": time.time() - 120,
    }
    checkpoint = CheckpointRecord(**values | changes)
    dashboard.harness.write(lambda db: checkpoints.insert(db, checkpoint))
    return checkpoint


def test_run_row_shows_model_and_progress(dashboard: DashboardSetup) -> None:
    session = add_session(dashboard.harness, dashboard.tenant_id, display_name="first try")
    run = add_run(dashboard.harness, session, used_at=time.time() - 7200)
    assert cells(dashboard.local.get().text, run.id)["Steps"] == "0"

    add_updates(dashboard.harness, run, 3.5, 2.25)

    page = dashboard.local.get().text
    row = cells(page, run.id)
    assert "first try" in page
    assert f'href="/runs/{run.id}"' in page
    assert (row["Base model"], row["State"]) == ("tinkex/bigram", "training")
    assert (row["Steps"], row["Metrics"]) == ("2", "loss 2.2500")
    assert int(row["Tokens/s"]) > 0
    assert row["Last activity"] in {"just now", "1 s ago", "2 s ago", "3 s ago"}


def test_name_in_metadata_overrides_session_name(dashboard: DashboardSetup) -> None:
    session = add_session(dashboard.harness, dashboard.tenant_id, display_name="whole sweep")
    run = add_run(dashboard.harness, session, user_metadata={"name": "rank 8"})

    assert "<h1><bdi>rank 8</bdi>" in dashboard.local.get(f"/runs/{run.id}").text


def test_overview_lists_newest_runs_and_total(
    dashboard: DashboardSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = add_session(dashboard.harness, dashboard.tenant_id)
    for number in range(4):
        add_run(dashboard.harness, session, id=f"run:{number}", created_at=float(number))
    monkeypatch.setattr(queries, "MAX_RUNS", 3)

    page = dashboard.local.get().text

    assert [number for number in range(4) if f"run:{number}<" in page] == [1, 2, 3]
    assert "1 to 3 of 4" in text_of(page)
    last = text_of(dashboard.local.get("/?page=2").text)
    assert "run:0" in last
    assert "4 to 4 of 4" in last


def listed_runs(dashboard: DashboardSetup, query: str) -> list[str]:
    """The ids in the list of runs, in order."""
    page = dashboard.local.get(f"/?{query}").text
    return re.findall(r'<tr data-key="([^"]+:train:0|run:\d)">', page)


def test_runs_can_be_searched_and_sorted(dashboard: DashboardSetup) -> None:
    harness = dashboard.harness
    session = add_session(harness, dashboard.tenant_id, display_name="Sweep", tags=["grün"])
    other = add_session(harness, dashboard.tenant_id)
    metadata = {"name": "b", "tags": ["Baseline"]}
    add_run(harness, session, id="run:0", created_at=1.0, num_steps=5, base_model="y")
    add_run(harness, other, id="run:1", created_at=2.0, user_metadata=metadata, base_model="z")
    add_run(harness, other, id="run:2", created_at=3.0, user_metadata={"name": "A"}, num_steps=9)

    assert listed_runs(dashboard, "") == ["run:2", "run:1", "run:0"]
    assert listed_runs(dashboard, "sort=created") == ["run:0", "run:1", "run:2"]
    assert listed_runs(dashboard, "sort=-steps") == ["run:2", "run:0", "run:1"]
    assert listed_runs(dashboard, "sort=name") == ["run:2", "run:1", "run:0"]
    assert listed_runs(dashboard, "sort=-model") == ["run:1", "run:0", "run:2"]
    assert listed_runs(dashboard, "q=sweep") == ["run:0"]
    assert listed_runs(dashboard, "q=gr%C3%BCn") == ["run:0"]
    assert listed_runs(dashboard, "q=basel") == ["run:1"]
    assert listed_runs(dashboard, "q=run:2&sort=nonsense&page=-1") == ["run:2"]
    assert "No run matches." in dashboard.local.get("/?q=%25").text


def test_queue_shows_pending_jobs_and_worker_state(dashboard: DashboardSetup) -> None:
    for kind in ("asample", "asample", "optim_step"):
        dashboard.harness.submit_job(kind, tenant_id=dashboard.tenant_id)
    running = dashboard.harness.submit_job("asample", tenant_id=dashboard.tenant_id)
    dashboard.harness.write(lambda db: jobs.mark_started(db, [running.id], time.time()))
    dashboard.harness.submit_job("forward", tenant_id=dashboard.harness.other_tenant_id)

    page = text_of(dashboard.local.get().text)

    assert re.search(r"asample 2 1 (just now|\d s ago)", page)
    assert re.search(r"optim_step 1 0 (just now|\d s ago)", page)
    assert "forward " not in page
    assert "No worker is running." in page

    listener = WakeupListener(dashboard.harness.services.database, "worker")
    try:
        page = text_of(dashboard.local.get().text)
    finally:
        listener.close()
    assert "Worker alive" in page
    assert "No worker is running" not in page


def test_checkpoints_show_path_and_visibility(dashboard: DashboardSetup) -> None:
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    add_checkpoint(dashboard, run, "one", is_public=True)
    add_checkpoint(dashboard, run, "two", expires_at=time.time() + 7300)
    add_checkpoint(dashboard, run, "passing", is_ephemeral=True)

    for path in ("/", f"/runs/{run.id}"):
        page = text_of(dashboard.local.get(path).text)
        assert f"tinker://{run.id}/weights/one 123 kB 2 min ago never everyone" in page
        assert f"tinker://{run.id}/weights/two 123 kB 2 min ago in 2 h you" in page
        assert "passing" not in page


def test_sessions_show_finish_reason(dashboard: DashboardSetup) -> None:
    now = time.time()
    add_session(dashboard.harness, dashboard.tenant_id, display_name="going")
    add_session(dashboard.harness, dashboard.tenant_id, display_name="silent", expired_at=now)
    ended = {"finished_at": now, "finish_reason": "success"}
    add_session(dashboard.harness, dashboard.tenant_id, display_name="over", **ended)

    page = text_of(dashboard.local.get().text)

    assert re.search(r"going \S+ default active – 0.36.0", page)  # noqa: RUF001
    assert re.search(r"silent \S+ default lost ", page)
    assert re.search(r"over \S+ default finished success ", page)


def test_empty_overview_shows_first_steps(dashboard: DashboardSetup) -> None:
    page = dashboard.local.get().text

    snippet = html.unescape(page.partition('<code id="snippet">')[2].partition("</code>")[0])
    assert 'base_url="http://localhost:8000"' in snippet
    assert '"tinkex/bigram"' in snippet
    compile(snippet, "snippet", "exec")
    assert str(dashboard.harness.services.home.key_file) in page
    add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    assert "snippet" not in dashboard.local.get().text


def test_key_file_path_shown_on_loopback_only(dashboard: DashboardSetup) -> None:
    dashboard.local.post("/login", key="tml-alice")

    page = dashboard.local.get().text

    assert "snippet" in page
    assert str(dashboard.harness.services.home.key_file) not in page


def test_run_page_shows_new_steps(dashboard: DashboardSetup) -> None:
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    path = f"/runs/{run.id}"
    add_updates(dashboard.harness, run, 4.0, 3.0)
    before = text_of(dashboard.local.get(path).text)
    add_updates(dashboard.harness, run, 1.0)
    after = text_of(dashboard.local.get(path).text)

    assert re.search(r"Steps 2 Loss 3\.0000 latest", before)
    assert re.search(r"Steps 3 Loss 1\.0000 latest", after)
    assert re.search(r"Tokens 30 trained", after)
    assert re.search(r"Finished 3 1\.0000 10 1 ", after)


def test_page_size_is_bounded_for_many_steps(dashboard: DashboardSetup) -> None:
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    add_updates(dashboard.harness, run, *(4.0 / (1 + number % 97) for number in range(3000)))

    page = dashboard.local.get(f"/runs/{run.id}").text

    assert len(page) < 60_000
    assert "The latest 20 of 3,000." in page


def test_run_page_shows_configuration_session_and_tags(dashboard: DashboardSetup) -> None:
    session = add_session(dashboard.harness, dashboard.tenant_id, tags=["sweep"])
    metadata = {"name": "x", "tags": ["mine"], "recipe": "sft", "plan": {"steps": 3}}
    run = add_run(dashboard.harness, session, user_metadata=metadata)
    add_run(dashboard.harness, session, id=f"{session.id}:train:1")

    page = text_of(dashboard.local.get(f"/runs/{run.id}").text)

    assert 'recipe sft plan {"steps": 3}' in page
    assert "rank 8" in page
    assert "mine sweep" in page
    assert f"Other runs of the session: {session.id}:train:1" in page


def test_hostile_names_are_escaped(dashboard: DashboardSetup) -> None:
    session = add_session(
        dashboard.harness,
        dashboard.tenant_id,
        display_name=HOSTILE,
        project_id=HOSTILE,
        sdk_version=HOSTILE,
        finished_at=1.0,
        finish_reason=HOSTILE,
    )
    named = {"base_model": HOSTILE, "user_metadata": {"name": HOSTILE}}
    run = add_run(dashboard.harness, session, **named)
    add_checkpoint(dashboard, run, HOSTILE)

    for path in ("/", f"/runs/{run.id}", "/runs/" + HOSTILE.replace("/", "")):
        page = dashboard.local.get(path).text
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert not {name for name in attribute_names(page) if name.startswith(("on", "style"))}
        assert "&lt;script&gt;" in page
        assert "49" not in text_of(page.partition("<bdi")[2].partition("</bdi>")[0])


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.text(st.characters(codec="utf-8", exclude_characters="/?#"), min_size=1))
def test_unknown_run_returns_html_404(dashboard: DashboardSetup, path: str) -> None:
    answer = dashboard.local.get("/runs/" + quote(path, safe=""))

    assert answer.status_code in {404, 405}


def test_store_error_returns_html_page(
    dashboard: DashboardSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Database, work: object) -> None:
        raise StoreBusy("the database is busy; try again")

    monkeypatch.setattr(Database, "read", fail)
    answer = dashboard.local.get()

    assert answer.status_code == 503
    assert "The database is busy; try again." in answer.text


def test_static_files_have_content_hash_urls(
    dashboard: DashboardSetup,
) -> None:
    page = dashboard.local.get().text
    addresses = set(re.findall(r'(?:href|src)="(/static/[^"]+)"', page))

    names = {address.split("/", 3)[3] for address in addresses}
    assert {"dashboard.css", "theme.js", "live.js", "icon.svg"} <= names
    for address in addresses:
        answer = dashboard.local.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    version = next(iter(addresses)).split("/")[2]
    assert dashboard.local.get(f"/static/{version}/page.js").status_code == 200
    for path in ("nothing.css", "../pages.py", "..%2fpages.py", "vendor/../../pages.py"):
        assert dashboard.local.get(f"/static/{version}/{path}").status_code == 404
    assert dashboard.local.get("/static/another/page.js").status_code == 404


def test_page_has_no_external_resources(dashboard: DashboardSetup) -> None:
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))
    add_updates(dashboard.harness, run, 2.0)

    for path in ("/", f"/runs/{run.id}", "/login"):
        page = dashboard.local.get(path).text
        assert not re.search(r'[ ](?:src|href|action)="(?![/#])', page)


def test_overview_shows_limited_quotas(dashboard: DashboardSetup) -> None:
    assert "<h2>Quotas</h2>" not in dashboard.local.get("/").text
    own = {"models": 12_345, "checkpoints": 0}
    dashboard.harness.write(lambda db: quotas.set_overrides(db, dashboard.tenant_id, own))
    page = dashboard.local.get("/").text
    assert "<h2>Quotas</h2>" in page
    assert "12,345" in page
    assert "<code>checkpoints</code>" not in page
