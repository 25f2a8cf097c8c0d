"""Pages of keys, usage and models, and the actions of the operator on them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server.dashboard.conftest import DEFAULT_KEY, DashboardSetup
from tests.integration.server.dashboard.test_page_session import LOCAL, csrf_token
from tests.support.dashboard_browser import Browser, add_run, add_session
from tests.support.server_harness import KEY, OTHER_KEY, ServerHarness
from tinkex.errors import BadRequestError
from tinkex.server.config import ServerConfig
from tinkex.server.dashboard import administration, page_session
from tinkex.server.dashboard.model_additions import (
    Candidate,
    add_command,
    choose_candidate,
    list_candidates,
)
from tinkex.store import accounting, keys
from tinkex.store.database import Connection

HOSTILE = '"><script>alert(1)</script>'
ACTIONS = {
    "/page/keys": {"tenant": "carol", "name": "laptop"},
    "/page/keys/revoke": {"id": 2},
    "/page/quotas": {"tenant": "bob", "limits": {"models": 1}},
    "/page/models": {"name": "smollm2-135m"},
}
PAGES = ("/playground", "/models", "/keys", "/usage")


def act(browser: Browser, path: str, body: object, **headers: str) -> tuple[int, Any]:
    answer = browser.get(path, method="POST", json=body, headers=headers)
    return answer.status_code, answer.json()


def act_locally(dashboard: DashboardSetup, path: str, body: object) -> tuple[int, Any]:
    """Send what the script of a local page sends."""
    token = csrf_token(dashboard.local)
    return act(dashboard.local, path, body, **LOCAL, **{"X-CSRF-Token": token})


def active_keys(harness: ServerHarness) -> dict[int, str]:
    listed = harness.read(keys.list_keys)
    return {key.id: tenant.name for key, tenant in listed if key.revoked_at is None}


def log_in(dashboard: DashboardSetup, key: str = KEY) -> Browser:
    browser = replace(dashboard.local, peer="192.168.0.7", host="trainer.example")
    assert browser.post("/login", key=key).status_code == 303
    return browser


@pytest.mark.parametrize("path", ACTIONS)
def test_only_operator_acts(dashboard: DashboardSetup, path: str) -> None:
    before = active_keys(dashboard.harness)

    status, reply = act(Browser(dashboard.harness), path, ACTIONS[path], **{"X-API-Key": KEY})

    assert (status, reply["detail"]) == (403, administration.OPERATOR_ONLY)
    assert active_keys(dashboard.harness) == before


@pytest.mark.parametrize("path", ACTIONS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), (LOCAL, 401), ({**LOCAL, "X-CSRF-Token": "0" * 64}, 403)],
    ids=["nothing", "origin alone", "wrong token"],
)
def test_action_needs_token_or_key(
    dashboard: DashboardSetup, path: str, headers: dict[str, str], status: int
) -> None:
    before = active_keys(dashboard.harness)

    assert act(dashboard.local, path, ACTIONS[path], **headers)[0] == status
    assert active_keys(dashboard.harness) == before


def test_cookie_alone_does_not_act(dashboard: DashboardSetup) -> None:
    operator = log_in(dashboard, DEFAULT_KEY)

    assert act(operator, "/page/keys", ACTIONS["/page/keys"])[0] == 401
    assert "carol" not in active_keys(dashboard.harness).values()


def test_foreign_site_cannot_act(dashboard: DashboardSetup) -> None:
    token = csrf_token(dashboard.local)
    headers = {"Origin": "http://evil.example", "X-CSRF-Token": token}

    status, reply = act(dashboard.local, "/page/keys", ACTIONS["/page/keys"], **headers)

    assert (status, reply["detail"]) == (403, page_session.FOREIGN_ORIGIN)


def test_created_key_works_and_is_shown_once(dashboard: DashboardSetup) -> None:
    status, created = act_locally(dashboard, "/page/keys", {"tenant": "carol", "name": "laptop"})

    assert status == 200
    assert dashboard.harness.send_request("GET", "/training_runs", key=created["key"]).is_success
    page = dashboard.local.get("/keys").text
    assert created["key"] not in page
    assert created["key"][:8] in page
    assert "carol" in page


def test_key_in_header_acts_too(dashboard: DashboardSetup) -> None:
    remote = replace(dashboard.local, peer="192.168.0.7", host="trainer.example")

    status, _ = act(remote, "/page/keys", ACTIONS["/page/keys"], **{"X-API-Key": DEFAULT_KEY})

    assert status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"tenant": "", "name": "x"},
        {"tenant": " x", "name": "x"},
        {"tenant": "a\nb", "name": "x"},
        {"tenant": "x" * 201, "name": "x"},
        {"tenant": "x", "name": "\x00"},
        {"tenant": "x", "name": "x", "note": "\x00"},
        {"tenant": "x", "name": "x", "note": "y" * 1001},
        {"tenant": 5, "name": "x"},
        {"name": "x"},
        [],
    ],
    ids=str,
)
def test_invalid_key_is_refused(dashboard: DashboardSetup, body: object) -> None:
    before = active_keys(dashboard.harness)

    status, reply = act_locally(dashboard, "/page/keys", body)

    assert status in {400, 422}
    assert reply["detail"]
    assert active_keys(dashboard.harness) == before


def test_large_body_is_refused(dashboard: DashboardSetup) -> None:
    body = {"tenant": "x" * 100_000, "name": "x"}

    assert act_locally(dashboard, "/page/keys", body)[0] == 413


def test_revoked_key_is_rejected_at_once(dashboard: DashboardSetup) -> None:
    harness = dashboard.harness
    assert harness.send_request("GET", "/training_runs", key=OTHER_KEY).is_success
    (key_id,) = [id for id, tenant in active_keys(harness).items() if tenant == "bob"]

    assert act_locally(dashboard, "/page/keys/revoke", {"id": key_id})[0] == 200

    assert harness.send_request("GET", "/training_runs", key=OTHER_KEY).status_code == 401
    assert act_locally(dashboard, "/page/keys/revoke", {"id": key_id})[0] == 404


def test_last_key_of_operator_stays(dashboard: DashboardSetup) -> None:
    (key_id,) = [id for id, name in active_keys(dashboard.harness).items() if name == "default"]

    status, reply = act_locally(dashboard, "/page/keys/revoke", {"id": key_id})

    assert status == 400
    assert "last one of the operator" in reply["detail"]
    assert key_id in active_keys(dashboard.harness)


def test_quotas_apply_and_can_be_reset(dashboard: DashboardSetup) -> None:
    harness = dashboard.harness
    limits = {"sessions_per_hour": 1, "models": None}
    assert act_locally(dashboard, "/page/quotas", {"tenant": "bob", "limits": limits})[0] == 200

    harness.session(OTHER_KEY)
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    assert harness.post("/create_session", body, key=OTHER_KEY).status_code == 429
    page = dashboard.local.get("/usage?tenant=bob").text
    assert "the operator, for this tenant" in page

    assert act_locally(dashboard, "/page/quotas", {"tenant": "bob", "limits": {}})[0] == 200
    assert harness.post("/create_session", body, key=OTHER_KEY).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"tenant": "nobody", "limits": {}}, 404),
        ({"tenant": "bob", "limits": {"models": -1}}, 400),
        ({"tenant": "bob", "limits": {"models": 2**70}}, 400),
        ({"tenant": "bob", "limits": {"unknown": 1}}, 400),
        ({"tenant": "bob", "limits": {"models": "1"}}, 422),
        ({"tenant": "\x00", "limits": {}}, 404),
    ],
    ids=str,
)
def test_invalid_quotas_are_refused(dashboard: DashboardSetup, body: object, status: int) -> None:
    assert act_locally(dashboard, "/page/quotas", body)[0] == status


@pytest.mark.parametrize("path", PAGES)
def test_page_needs_login(dashboard: DashboardSetup, path: str) -> None:
    remote = replace(dashboard.local, peer="192.168.0.7", host="trainer.example")

    assert remote.get(path).status_code == 401


def use_tokens(db: Connection, tenant_id: str, amount: int) -> None:
    accounting.add_usage(
        db,
        tenant_id=tenant_id,
        session_id="s",
        run_id=None,
        base_model="tinkex/bigram",
        kind="sample",
        amount=amount,
        now=time.time(),
    )


def test_tenant_sees_only_own_keys_and_usage(dashboard: DashboardSetup) -> None:
    harness = dashboard.harness
    harness.write(lambda db: use_tokens(db, harness.tenant_id, 1234))
    harness.write(lambda db: use_tokens(db, harness.other_tenant_id, 5678))
    alice = log_in(dashboard)

    pages = {path: alice.get(path) for path in PAGES}

    assert {page.status_code for page in pages.values()} == {200}
    for page in pages.values():
        assert "bob" not in page.text
        assert "5,678" not in page.text
        assert "/page/" not in page.text
        assert "Who uses them" not in page.text
    assert "1,234" in pages["/usage"].text
    # The message is the same for a tenant that does not exist.
    assert alice.get("/usage?tenant=bob").status_code == 404
    assert alice.get("/usage?tenant=nobody").status_code == 404


def test_operator_sees_all_tenants(dashboard: DashboardSetup) -> None:
    harness = dashboard.harness
    harness.write(lambda db: use_tokens(db, harness.other_tenant_id, 5678))
    add_run(harness, add_session(harness, harness.tenant_id))

    assert "5,678" in dashboard.local.get("/usage").text
    assert "5,678" in dashboard.local.get("/usage?tenant=bob").text
    assert "bob&#39;s" in dashboard.local.get("/keys").text
    users = dashboard.local.get("/models").text.partition("Who uses them")[2]
    assert "alice@example.com" in users
    assert "5,678" in users
    found = dashboard.local.get("/keys?search=ALICE").text
    assert "alice@example.com" in found
    assert "bob" not in found


@pytest.mark.parametrize("search", ["%", "_", "\\", HOSTILE, "x" * 5000])
def test_hostile_search_finds_nothing(dashboard: DashboardSetup, search: str) -> None:
    page = dashboard.local.get("/keys", params={"search": search})

    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "tml-alice"[:8] not in page.text


def test_hostile_names_are_escaped(dashboard: DashboardSetup) -> None:
    body = {"tenant": HOSTILE, "name": HOSTILE, "note": HOSTILE}
    assert act_locally(dashboard, "/page/keys", body)[0] == 200
    session = add_session(dashboard.harness, dashboard.tenant_id, display_name=HOSTILE)
    add_run(dashboard.harness, session, base_model=HOSTILE)

    for path in (*PAGES, f"/playground?model={HOSTILE}"):
        page = dashboard.local.get(path)
        assert page.status_code == 200
        assert "<script>alert" not in page.text
    assert dashboard.local.get("/usage", params={"tenant": HOSTILE}).status_code == 200
    assert dashboard.local.get("/usage", params={"tenant": "\x00"}).status_code == 404
    assert dashboard.local.get("/keys", params={"search": "\x00"}).status_code == 200


# --- adding models ---------------------------------------------------------------------------


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """A folder with a model, a GGUF file, and things that are neither."""
    folder = tmp_path / "allowed"
    (folder / "good").mkdir(parents=True)
    (folder / "good" / "config.json").write_text("{}")
    (folder / "file.gguf").write_bytes(b"GGUF")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "config.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "bad name").mkdir()
    (folder / "bad name" / "config.json").write_text("{}")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("{}")
    (folder / "link").symlink_to(secret)
    return folder


def test_candidates_are_packages_and_allowed_models(tmp_path: Path, allowed: Path) -> None:
    config = ServerConfig(home=tmp_path, model_folders=(str(allowed), str(tmp_path / "missing")))

    found = list_candidates(config, ())

    assert [each.name for each in found] == ["smollm2-135m", "file", "good"]
    assert [each.name for each in list_candidates(config, ["good", "file"])] == ["smollm2-135m"]


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("secret", "{root}/secret"),
        ("link", "{root}/allowed/link"),
        ("good", "{root}/allowed/../secret"),
        ("other", "{root}/allowed/good"),
        ("good", "{root}/allowed/good/"),
        ("--help", ""),
        ("/etc", ""),
        ("org/hub-model", ""),
    ],
)
def test_other_models_are_refused(tmp_path: Path, allowed: Path, name: str, location: str) -> None:
    config = ServerConfig(home=tmp_path, model_folders=(str(allowed),))

    with pytest.raises(BadRequestError):
        choose_candidate(config, name, location.format(root=tmp_path))
    assert choose_candidate(config, "good", str(allowed / "good")).name == "good"


def test_name_of_model_is_no_option(tmp_path: Path) -> None:
    command = add_command(tmp_path, Candidate(name="--help", location="/models/--help"))

    assert command[-3:] == ["--", "--help", "/models/--help"]


def test_server_with_fixed_models_shows_how_to_add_one(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="settings"):
        choose_candidate(ServerConfig(home=tmp_path, engine="fake"), "smollm2-135m", "")
