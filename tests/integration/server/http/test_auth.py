from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_harness import KEY, OTHER_KEY, House, open_house
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
def test_every_endpoint_but_health_asks_for_a_key(house: House, name: str) -> None:
    row = ENDPOINTS[name]

    missing = house.ask(row.method, concrete(row.path), key=None)
    wrong = house.ask(row.method, concrete(row.path), key="tml-nobody")

    assert (missing.status_code, missing.json()["error"]) == (401, auth.MISSING_KEY)
    assert (wrong.status_code, wrong.json()["error"]) == (401, auth.INVALID_KEY)
    assert wrong.headers["www-authenticate"] == "Bearer"


def test_health_asks_for_none(house: House) -> None:
    answer = house.ask("GET", "/healthz", key=None)

    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert house.ask("HEAD", "/healthz", key=None).status_code == 200


def test_a_key_may_come_as_a_bearer_token(house: House) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {KEY}"}
        answer = house.ask("GET", "/auth/apikey/me", key=None, headers=headers)
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
def test_what_is_no_credential_opens_nothing(house: House, headers: dict[str, Any]) -> None:
    assert house.ask("GET", "/auth/apikey/me", key=None, headers=headers).status_code == 401


def test_the_key_says_whose_it_is(house: House) -> None:
    answer = house.ask("GET", "/auth/apikey/me").json()

    assert answer["name"] == "alice's"
    assert answer["note"] == "at home"
    assert answer["details"] == {
        "org_details": {"name": "alice@example.com"},
        "user_details": {"email": "alice@example.com"},
    }


def test_a_revoked_key_and_its_tokens_open_nothing_from_that_moment_on(house: House) -> None:
    token = house.post("/auth/token", {}).json()["jwt"]
    assert house.ask("GET", "/auth/apikey/me", key=token).status_code == 200

    assert house.ask("DELETE", "/auth/apikey/me").status_code == 200

    for credential in (KEY, token):
        answer = house.ask("GET", "/auth/apikey/me", key=credential)
        assert (answer.status_code, answer.json()["error"]) == (401, auth.INVALID_KEY)
    assert house.ask("GET", "/auth/apikey/me", key=OTHER_KEY).status_code == 200


def test_a_key_revoked_elsewhere_is_forgotten_within_two_seconds(house: House) -> None:
    key_id = house.ask("GET", "/auth/apikey/me").json()["key_id"]

    house.write(lambda db: keys.revoke(db, key_id, time.time()))

    for memory in (house.services.cache.identities, house.services.cache.rejections):
        assert memory.ttl_seconds <= 2.0
    later = time.monotonic() + 2.0
    assert house.services.cache.identities.get(keys.hash_key(KEY), later) is None
    assert house.ask("GET", "/auth/apikey/me").status_code == 401


def test_a_flood_of_wrong_keys_is_remembered_within_bounds(house: House) -> None:
    house.ask("GET", "/auth/apikey/me")
    unknown = house.services.cache.rejections

    for number in range(1100):
        unknown.put(str(number), auth.INVALID_KEY)

    assert len(unknown) <= 1024
    assert house.services.cache.identities.get(keys.hash_key(KEY)) is not None


def test_a_token_names_its_tenant_as_whoami_reads_it(house: House) -> None:
    token = house.post("/auth/token", {}).json()["jwt"]

    body = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    assert claims["sub"] == f"tml:user:{house.tenant_id}"
    assert claims["org_id"] == house.tenant_id
    assert claims["email"] == "alice@example.com"
    assert claims["iss"].startswith("passport-")
    assert claims["exp"] - claims["iat"] == int(house.services.config.jwt_seconds)


def test_an_expired_token_says_so(house: House) -> None:
    tenant = house.read(lambda db: keys.find_tenant(db, house.tenant_id))
    key_id = house.ask("GET", "/auth/apikey/me").json()["key_id"]
    identity = CallerIdentity(tenant_id=house.tenant_id, key_id=key_id)

    token = issue_token(house.services.secret, identity, tenant, -1.0)

    answer = house.ask("GET", "/auth/apikey/me", key=token)
    assert (answer.status_code, answer.json()["error"]) == (401, auth.EXPIRED_TOKEN)


def test_a_token_signed_elsewhere_opens_nothing(house: House) -> None:
    tenant = house.read(lambda db: keys.find_tenant(db, house.tenant_id))
    identity = CallerIdentity(tenant_id=house.tenant_id, key_id=1)

    token = issue_token(b"another secret", identity, tenant, 60.0)

    assert house.ask("GET", "/auth/apikey/me", key=token).json()["error"] == auth.INVALID_KEY


def test_a_token_that_names_another_tenant_than_its_key_opens_nothing(house: House) -> None:
    tenant = house.read(lambda db: keys.find_tenant(db, house.other_id))
    key_id = house.ask("GET", "/auth/apikey/me").json()["key_id"]

    mixed = CallerIdentity(tenant_id=house.other_id, key_id=key_id)
    token = issue_token(house.services.secret, mixed, tenant, 60.0)

    assert house.ask("GET", "/auth/apikey/me", key=token).status_code == 401


def _ends_at(token: str) -> int:
    body = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return int(claims["exp"])


def test_a_token_cannot_prolong_itself(house: House) -> None:
    tenant = house.read(lambda db: keys.find_tenant(db, house.tenant_id))
    key_id = house.ask("GET", "/auth/apikey/me").json()["key_id"]
    identity = CallerIdentity(tenant_id=house.tenant_id, key_id=key_id)
    stolen = issue_token(house.services.secret, identity, tenant, 100.0)

    renewed = house.post("/auth/token", {}, key=stolen).json()["jwt"]
    again = house.post("/auth/token", {}, key=renewed).json()["jwt"]

    assert _ends_at(stolen) == _ends_at(renewed) == _ends_at(again)
    assert house.ask("GET", "/auth/apikey/me", key=again).status_code == 200
    fresh = house.post("/auth/token", {}).json()["jwt"]
    assert _ends_at(fresh) > _ends_at(stolen)


@pytest.mark.parametrize("is_on", [True, False])
def test_clients_use_tokens_unless_the_settings_say_otherwise(tmp_path: Path, is_on: bool) -> None:
    with open_house(tmp_path, **({} if is_on else {"jwt": False})) as house:
        answer = house.post("/client/config", {"sdk_version": "0.36.0"})
        assert answer.json()["pjwt_auth_enabled"] is is_on
