from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_harness import KEY, OTHER_KEY, ServerHarness, open_harness
from tinkex.server.app import ROUTES
from tinkex.server.http import auth
from tinkex.server.http.auth import issue_token
from tinkex.server.http.request_context import CallerIdentity
from tinkex.store import keys
from tinkex.wire.endpoints import ENDPOINTS


def concrete(path: str) -> str:
    for name, value in {
        "{training_run_id}": "s:train:0",
        "{checkpoint_id}": "weights/0001",
        "{session_id}": "s",
        "{sampler_id}": "s:sample:0",
    }.items():
        path = path.replace(name, value)
    return path


@pytest.mark.parametrize("name", sorted(set(ROUTES) - {"health"}))
def test_all_endpoints_except_health_require_key(harness: ServerHarness, name: str) -> None:
    row = ENDPOINTS[name]

    missing = harness.send_request(row.method, concrete(row.path), key=None)
    wrong = harness.send_request(row.method, concrete(row.path), key="tml-nobody")

    assert (missing.status_code, missing.json()["error"]) == (401, auth.MISSING_KEY)
    assert (wrong.status_code, wrong.json()["error"]) == (401, auth.INVALID_KEY)
    assert wrong.headers["www-authenticate"] == "Bearer"


def test_health_requires_no_key(harness: ServerHarness) -> None:
    answer = harness.send_request("GET", "/healthz", key=None)

    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert harness.send_request("HEAD", "/healthz", key=None).status_code == 200


def test_key_as_bearer_token(harness: ServerHarness) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {KEY}"}
        answer = harness.send_request("GET", "/auth/apikey/me", key=None, headers=headers)
        assert answer.json()["name"] == "alice's"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"X-API-Key": ""},
        {"X-API-Key": "x" * 10_000},
        {"X-API-Key": "eyJ.eyJ.sig"},
        {"X-API-Key": b"\xff\xe2\x80"},
    ],
)
def test_invalid_credentials_return_401(harness: ServerHarness, headers: dict[str, Any]) -> None:
    assert (
        harness.send_request("GET", "/auth/apikey/me", key=None, headers=headers).status_code == 401
    )


def test_key_determines_tenant(harness: ServerHarness) -> None:
    answer = harness.send_request("GET", "/auth/apikey/me").json()

    assert answer["name"] == "alice's"
    assert answer["note"] == "at home"
    assert answer["details"] == {
        "org_details": {"name": "alice@example.com"},
        "user_details": {"email": "alice@example.com"},
    }


def test_revoked_key_invalidates_key_and_tokens(
    harness: ServerHarness,
) -> None:
    token = harness.post("/auth/token", {}).json()["jwt"]
    assert harness.send_request("GET", "/auth/apikey/me", key=token).status_code == 200

    assert harness.send_request("DELETE", "/auth/apikey/me").status_code == 200

    for credential in (KEY, token):
        answer = harness.send_request("GET", "/auth/apikey/me", key=credential)
        assert (answer.status_code, answer.json()["error"]) == (401, auth.INVALID_KEY)
    assert harness.send_request("GET", "/auth/apikey/me", key=OTHER_KEY).status_code == 200


def test_key_revoked_by_other_process_expires_from_cache(harness: ServerHarness) -> None:
    key_id = harness.send_request("GET", "/auth/apikey/me").json()["key_id"]

    harness.write(lambda db: keys.revoke(db, key_id, time.time()))

    for memory in (harness.services.cache.identities, harness.services.cache.rejections):
        assert memory.ttl_seconds <= 2.0
    later = time.monotonic() + 2.0
    assert harness.services.cache.identities.get(keys.hash_key(KEY), later) is None
    assert harness.send_request("GET", "/auth/apikey/me").status_code == 401


def test_invalid_key_cache_is_bounded(harness: ServerHarness) -> None:
    harness.send_request("GET", "/auth/apikey/me")
    unknown = harness.services.cache.rejections

    for number in range(1100):
        unknown.put(str(number), auth.INVALID_KEY)

    assert len(unknown) <= 1024
    assert harness.services.cache.identities.get(keys.hash_key(KEY)) is not None


def test_token_claims_match_whoami(harness: ServerHarness) -> None:
    token = harness.post("/auth/token", {}).json()["jwt"]

    body = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    assert claims["sub"] == f"tml:user:{harness.tenant_id}"
    assert claims["org_id"] == harness.tenant_id
    assert claims["email"] == "alice@example.com"
    assert claims["iss"].startswith("passport-")
    assert claims["exp"] - claims["iat"] == int(harness.services.config.jwt_seconds)


def test_expired_token_error_message(harness: ServerHarness) -> None:
    tenant = harness.read(lambda db: keys.find_tenant(db, harness.tenant_id))
    key_id = harness.send_request("GET", "/auth/apikey/me").json()["key_id"]
    identity = CallerIdentity(tenant_id=harness.tenant_id, key_id=key_id)

    token = issue_token(harness.services.secret, identity, tenant, -1.0)

    answer = harness.send_request("GET", "/auth/apikey/me", key=token)
    assert (answer.status_code, answer.json()["error"]) == (401, auth.EXPIRED_TOKEN)


def test_token_with_foreign_signature_is_rejected(harness: ServerHarness) -> None:
    tenant = harness.read(lambda db: keys.find_tenant(db, harness.tenant_id))
    identity = CallerIdentity(tenant_id=harness.tenant_id, key_id=1)

    token = issue_token(b"another secret", identity, tenant, 60.0)

    assert (
        harness.send_request("GET", "/auth/apikey/me", key=token).json()["error"]
        == auth.INVALID_KEY
    )


def test_token_with_mismatched_tenant_is_rejected(
    harness: ServerHarness,
) -> None:
    tenant = harness.read(lambda db: keys.find_tenant(db, harness.other_tenant_id))
    key_id = harness.send_request("GET", "/auth/apikey/me").json()["key_id"]

    mixed = CallerIdentity(tenant_id=harness.other_tenant_id, key_id=key_id)
    token = issue_token(harness.services.secret, mixed, tenant, 60.0)

    assert harness.send_request("GET", "/auth/apikey/me", key=token).status_code == 401


def _ends_at(token: str) -> int:
    body = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return int(claims["exp"])


def test_exchanged_token_keeps_expiry(harness: ServerHarness) -> None:
    tenant = harness.read(lambda db: keys.find_tenant(db, harness.tenant_id))
    key_id = harness.send_request("GET", "/auth/apikey/me").json()["key_id"]
    identity = CallerIdentity(tenant_id=harness.tenant_id, key_id=key_id)
    stolen = issue_token(harness.services.secret, identity, tenant, 100.0)

    renewed = harness.post("/auth/token", {}, key=stolen).json()["jwt"]
    again = harness.post("/auth/token", {}, key=renewed).json()["jwt"]

    assert _ends_at(stolen) == _ends_at(renewed) == _ends_at(again)
    assert harness.send_request("GET", "/auth/apikey/me", key=again).status_code == 200
    fresh = harness.post("/auth/token", {}).json()["jwt"]
    assert _ends_at(fresh) > _ends_at(stolen)


@pytest.mark.parametrize("is_on", [True, False])
def test_client_config_enables_tokens_by_default(tmp_path: Path, is_on: bool) -> None:
    with open_harness(tmp_path, **({} if is_on else {"jwt": False})) as harness:
        answer = harness.post("/client/config", {"sdk_version": "0.36.0"})
        assert answer.json()["pjwt_auth_enabled"] is is_on
