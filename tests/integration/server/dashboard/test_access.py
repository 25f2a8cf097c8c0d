from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server.dashboard.conftest import DEFAULT_KEY, DashboardSetup
from tests.support.dashboard_browser import Browser, add_run, add_session
from tests.support.server_harness import KEY, ServerHarness, open_harness
from tinkex.server.dashboard import login
from tinkex.server.dashboard.login import COOKIE_NAME
from tinkex.server.http.auth import issue_token
from tinkex.server.http.request_context import CallerIdentity
from tinkex.store import keys

FORM = 'action="/login"'


@pytest.fixture
def public_dashboard(tmp_path: Path) -> Iterator[ServerHarness]:
    """A server that listens on a public address."""
    with open_harness(tmp_path / "open", host="0.0.0.0") as harness:
        harness.write(lambda db: keys.get_or_create_tenant(db, "default", time.time()))
        yield harness


def names(answer: httpx.Response) -> str:
    """The tenant whose page is shown."""
    return answer.text.partition('<bdi class="tenant">')[2].partition("</bdi>")[0]


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_loopback_needs_no_key(dashboard: DashboardSetup, host: str) -> None:
    peer = "::1" if "::" in host else "127.0.0.1"
    answer = replace(dashboard.local, host=host, peer=peer).get()

    assert answer.status_code == 200
    assert names(answer) == "default"
    assert FORM not in answer.text


@pytest.mark.parametrize(
    "changes",
    [
        {"peer": "192.168.0.7"},
        {"host": "evil.example"},
        {"host": "localhost.evil.example:8000"},
        {"headers": {"X-Forwarded-For": "127.0.0.1"}},
        {"headers": {"X-Forwarded-Host": "localhost"}},
        {"headers": {"Forwarded": "for=127.0.0.1"}},
        {"headers": {"Via": "1.1 proxy"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/", "/runs/x:train:0"])
def test_remote_visitor_needs_key(
    dashboard: DashboardSetup, changes: dict[str, Any], path: str
) -> None:
    answer = replace(dashboard.local, **changes).get(path)

    assert answer.status_code == 401
    assert FORM in answer.text
    assert "default" not in answer.text


def test_public_server_requires_key_on_loopback(public_dashboard: ServerHarness) -> None:
    assert Browser(public_dashboard).get().status_code == 401


def test_login_required_without_default_tenant(harness: ServerHarness) -> None:
    assert Browser(harness).get().status_code == 401


def test_login_shows_tenant_until_logout(dashboard: DashboardSetup) -> None:
    browser = replace(dashboard.local, peer="192.168.0.7", host="trainer.example")

    entered = browser.post("/login", key=f"  {KEY} ", target="/")
    seen = browser.get()
    left = browser.post("/logout")
    after = browser.get()

    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert (seen.status_code, names(seen)) == (200, "alice@example.com")
    assert (left.status_code, left.headers["location"]) == (303, "/")
    assert after.status_code == 401


def test_login_cookie_is_httponly_and_samesite(dashboard: DashboardSetup) -> None:
    plain = dashboard.local.post("/login", key=KEY).headers["set-cookie"]
    encrypted = (
        replace(dashboard.local, scheme="https").post("/login", key=KEY).headers["set-cookie"]
    )

    for cookie in (plain, encrypted):
        words = {word.strip().lower() for word in cookie.split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/", "max-age=3600"} <= words
        assert KEY not in cookie
    assert "secure" not in plain.lower()
    assert "secure" in encrypted.lower()


def test_login_on_loopback_switches_tenant(dashboard: DashboardSetup) -> None:
    dashboard.local.post("/login", key=KEY)
    assert names(dashboard.local.get()) == "alice@example.com"

    dashboard.local.post("/logout")
    assert names(dashboard.local.get()) == "default"


@pytest.mark.parametrize("key", ["", "tml-wrong", "nonsense", "x" * 5000, "tml-\x00<script>"])
def test_invalid_key_shows_login_form(dashboard: DashboardSetup, key: str) -> None:
    browser = replace(dashboard.local, peer="192.168.0.7")

    answer = browser.post("/login", key=key)

    assert answer.status_code == 401
    assert FORM in answer.text
    assert login.INVALID_KEY in answer.text
    assert "set-cookie" not in answer.headers
    assert "<script>" not in answer.text.partition("<main")[2]


def test_oversized_form_is_rejected(dashboard: DashboardSetup) -> None:
    answer = dashboard.local.post("/login", key="x" * 100_000)

    assert answer.status_code == 413
    assert FORM in answer.text


def test_token_is_not_accepted_for_login(dashboard: DashboardSetup) -> None:
    dashboard.local.post("/login", key=KEY)
    token = dashboard.local.cookies[COOKIE_NAME]

    assert Browser(dashboard.harness, peer="10.0.0.1").post("/login", key=token).status_code == 401


def test_cross_site_form_is_rejected(dashboard: DashboardSetup) -> None:
    stranger = replace(dashboard.local, headers={"Origin": "http://evil.example"})

    entered, left = stranger.post("/login", key=KEY), stranger.post("/logout")

    assert (entered.status_code, left.status_code) == (403, 403)
    assert "set-cookie" not in entered.headers
    assert "set-cookie" not in left.headers
    own = replace(dashboard.local, headers={"Origin": "http://localhost:8000"})
    assert own.post("/login", key=KEY).status_code == 303


@pytest.mark.parametrize("age", ["expired", "forged", "revoked"])
def test_invalid_cookie_requires_login(dashboard: DashboardSetup, age: str) -> None:
    services = dashboard.harness.services
    key = dashboard.harness.read(lambda db: keys.find_by_secret(db, DEFAULT_KEY))
    tenant = dashboard.harness.read(lambda db: keys.find_tenant(db, dashboard.tenant_id))
    identity = CallerIdentity(tenant_id=tenant.id, key_id=key.id)
    secret = b"another" if age == "forged" else services.secret
    token = issue_token(secret, identity, tenant, -5 if age == "expired" else 60)
    if age == "revoked":
        dashboard.harness.write(lambda db: keys.revoke(db, key.id, time.time()))

    browser = Browser(
        dashboard.harness, peer="10.0.0.1", cookies=httpx.Cookies({COOKIE_NAME: token})
    )

    assert browser.get().status_code == 401


def test_login_redirects_to_requested_page(dashboard: DashboardSetup) -> None:
    run = add_run(dashboard.harness, add_session(dashboard.harness, dashboard.harness.tenant_id))
    browser = replace(dashboard.local, peer="10.0.0.1")

    asked = browser.get(f"/runs/{run.id}")
    entered = browser.post("/login", key=KEY, target=f"/runs/{run.id}")
    elsewhere = browser.post("/login", key=KEY, target="//evil.example")

    assert f'value="/runs/{run.id}"' in asked.text
    assert entered.headers["location"] == f"/runs/{run.id}"
    assert browser.get(entered.headers["location"]).status_code == 200
    assert elsewhere.headers["location"] == "/"


def test_runs_hidden_from_other_tenants(dashboard: DashboardSetup) -> None:
    foreign = add_run(
        dashboard.harness, add_session(dashboard.harness, dashboard.harness.other_tenant_id)
    )

    page, foreign_page = dashboard.local.get(), dashboard.local.get(f"/runs/{foreign.id}")
    unknown_page = dashboard.local.get("/runs/nothing:train:0")

    assert foreign.id not in page.text
    assert (foreign_page.status_code, unknown_page.status_code) == (404, 404)
    assert foreign_page.text.replace(foreign.id, "nothing:train:0") == unknown_page.text


@pytest.mark.parametrize("path", ["/", "/login", "/runs/unknown"])
def test_pages_are_self_contained_and_uncached(dashboard: DashboardSetup, path: str) -> None:
    headers = dashboard.local.get(path).headers

    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-type"] == "text/html; charset=utf-8"


def test_get_and_head_have_no_side_effects(dashboard: DashboardSetup) -> None:
    assert dashboard.local.get(method="HEAD").status_code == 200
    for path in ("/", "/runs/x"):
        assert dashboard.local.get(path, method="POST").status_code == 405
    assert dashboard.local.get("/logout").status_code == 405
