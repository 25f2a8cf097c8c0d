"""Requests of page scripts: session cookie or local access, CSRF token and origin."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.server.dashboard.conftest import DashboardSetup
from tests.support.dashboard_browser import Browser, add_run, add_session
from tests.support.server_harness import KEY, ServerHarness, open_harness
from tinkex.server.dashboard import page_session
from tinkex.store import runs
from tinkex.store.records import RunRecord

LOCAL = {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
REMOTE = {"Origin": "http://trainer.example", "Sec-Fetch-Site": "same-origin"}


def csrf_token(browser: Browser) -> str:
    """The token in the page that a browser sees."""
    found = re.search(r'<meta name="csrf-token" content="([0-9a-f]{64})">', browser.get().text)
    assert found is not None
    return found[1]


def rename(browser: Browser, run: RunRecord, token: str | None, **headers: str) -> tuple[int, Any]:
    """Send what the page sends to rename a run."""
    sent = headers if token is None else {**headers, "X-CSRF-Token": token}
    path = f"/api/v1/training_runs/{run.id}/name"
    answer = browser.get(path, method="PUT", json={"name": "changed"}, headers=sent)
    return answer.status_code, answer.json()


def name_of(harness: ServerHarness, run: RunRecord) -> object:
    found = harness.read(lambda db: runs.find(db, run.id))
    return (found.user_metadata or {}).get("name")


@pytest.fixture
def run(dashboard: DashboardSetup) -> RunRecord:
    """A run of the default tenant."""
    return add_run(dashboard.harness, add_session(dashboard.harness, dashboard.tenant_id))


@pytest.fixture
def remote(dashboard: DashboardSetup) -> Browser:
    """A browser on another machine, logged in as another tenant."""
    browser = replace(dashboard.local, peer="192.168.0.7", host="trainer.example")
    assert browser.post("/login", key=KEY).status_code == 303
    return browser


def test_local_page_acts_for_owner(dashboard: DashboardSetup, run: RunRecord) -> None:
    token = csrf_token(dashboard.local)

    assert rename(dashboard.local, run, token, **LOCAL)[0] == 200
    assert name_of(dashboard.harness, run) == "changed"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://localhost:9999"},
        {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
def test_foreign_origin_is_refused(
    dashboard: DashboardSetup, run: RunRecord, headers: dict[str, str]
) -> None:
    status, reply = rename(dashboard.local, run, csrf_token(dashboard.local), **headers)

    assert (status, reply["detail"]) == (403, page_session.FOREIGN_ORIGIN)
    assert name_of(dashboard.harness, run) is None


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000"])
def test_rebound_host_is_refused(dashboard: DashboardSetup, run: RunRecord, host: str) -> None:
    token = csrf_token(dashboard.local)
    rebound = replace(dashboard.local, host=host)

    status, reply = rename(rebound, run, token, Origin=f"http://{host}")

    assert (status, reply["detail"]) == (401, page_session.NO_SESSION)
    assert name_of(dashboard.harness, run) is None


@pytest.mark.parametrize("token", [None, "", "0" * 64, "z" * 5000])
def test_wrong_token_is_refused(
    dashboard: DashboardSetup, run: RunRecord, token: str | None
) -> None:
    status, _ = rename(dashboard.local, run, token, **LOCAL)

    assert status == (401 if token is None else 403)
    assert name_of(dashboard.harness, run) is None


def test_session_acts_for_its_tenant_only(
    dashboard: DashboardSetup, run: RunRecord, remote: Browser
) -> None:
    harness = dashboard.harness
    own = add_run(harness, add_session(harness, harness.tenant_id))
    token = csrf_token(remote)

    assert rename(remote, own, token, **REMOTE)[0] == 200
    assert name_of(harness, own) == "changed"
    assert rename(remote, run, token, **REMOTE)[0] == 404
    assert name_of(harness, run) is None


def test_token_of_another_session_is_refused(
    dashboard: DashboardSetup, run: RunRecord, remote: Browser
) -> None:
    harness = dashboard.harness
    own = add_run(harness, add_session(harness, harness.tenant_id))

    assert rename(remote, own, csrf_token(dashboard.local), **REMOTE)[0] == 403
    assert rename(dashboard.local, run, csrf_token(remote), **LOCAL)[0] == 403
    assert name_of(harness, own) is None


def test_session_ends_with_logout(dashboard: DashboardSetup, remote: Browser) -> None:
    harness = dashboard.harness
    own = add_run(harness, add_session(harness, harness.tenant_id))
    token = csrf_token(remote)
    remote.post("/logout")

    assert rename(remote, own, token, **REMOTE)[0] == 401


def test_key_in_header_needs_no_token(dashboard: DashboardSetup) -> None:
    harness = dashboard.harness
    own = add_run(harness, add_session(harness, harness.tenant_id))
    browser = Browser(harness, peer="10.0.0.1", host="trainer.example")

    assert rename(browser, own, None, **{"X-API-Key": KEY})[0] == 200
    # A wrong token does not matter, and the key does not either if it is wrong.
    assert rename(browser, own, "wrong", **{"X-API-Key": KEY})[0] == 200
    assert rename(browser, own, "wrong", **{"X-API-Key": "tml-no"})[0] == 401


def test_cookie_alone_is_no_credential(remote: Browser) -> None:
    assert remote.get("/api/v1/training_runs").status_code == 401
    token = csrf_token(remote)
    assert remote.get("/api/v1/training_runs", headers={"X-CSRF-Token": token}).status_code == 200


def test_public_server_has_no_local_pages(tmp_path: Any, dashboard: DashboardSetup) -> None:
    token = csrf_token(dashboard.local)
    with open_harness(tmp_path / "open", host="0.0.0.0") as harness:
        own = add_run(harness, add_session(harness, harness.tenant_id))

        assert rename(Browser(harness), own, token, **LOCAL)[0] == 401


def test_responses_carry_no_cors_headers(dashboard: DashboardSetup) -> None:
    headers = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "x-csrf-token",
    }
    for path in ("/", "/api/v1/training_runs/x/name"):
        answer = dashboard.local.get(path, method="OPTIONS", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]
