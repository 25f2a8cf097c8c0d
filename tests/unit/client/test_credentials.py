"""Credentials: lookup order, storage, token renewal and redaction."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.token_exchange import KEY, Exchange, make_jwt
from tinkex.client.credentials import (
    Credential,
    CredentialStore,
    KeyRecord,
    decode_jwt_claims,
    find_credential,
    redact,
)
from tinkex.client.identity import TokenSource
from tinkex.errors import APIResponseValidationError, ClientClosed, ConfigError, InvalidInput
from tinkex.settings import Environment


def record(key: str = KEY, name: str = "mine") -> KeyRecord:
    return KeyRecord(key=key, name=name)


@pytest.fixture
def store(tmp_path: Path) -> CredentialStore:
    return CredentialStore(tmp_path / ".tinker" / "credentials.json")


def test_credential_source_order(store: CredentialStore) -> None:
    store.add("k1", record("tml-stored"))
    everything = Environment(
        api_key="tml-env", credential_command="echo tml-cmd", credentials_file=store.path
    )
    no_key = Environment(credential_command="echo tml-cmd", credentials_file=store.path)
    only_file = Environment(credentials_file=store.path)
    cases = [
        ("tml-arg", everything, "api_key argument", "tml-arg", None),
        (None, everything, "TINKER_API_KEY", "tml-env", None),
        ("", everything, "TINKER_API_KEY", "tml-env", None),
        (None, no_key, "TINKER_CREDENTIAL_CMD", None, "echo tml-cmd"),
        (None, only_file, "credentials file", "tml-stored", None),
    ]
    for explicit, environment, source, value, command in cases:
        assert find_credential(explicit, environment) == Credential(
            source=source, value=value, command=command
        )


def test_no_credential_found(tmp_path: Path) -> None:
    assert find_credential(None, Environment()) is None
    assert find_credential(None, Environment(credentials_file=tmp_path / "none.json")) is None


def test_missing_default_key_counts_as_none(store: CredentialStore) -> None:
    store.add("k1", record())
    store.remove("k1")
    assert find_credential(None, Environment(credentials_file=store.path)) is None
    store.add("k2", record(), make_default=False)
    assert find_credential(None, Environment(credentials_file=store.path)) is None


def test_credential_repr_shows_no_secret() -> None:
    for credential in (
        Credential(source="api_key argument", value=KEY),
        Credential(source="TINKER_CREDENTIAL_CMD", command=f"echo {KEY}"),
    ):
        assert "secret" not in f"{credential} {credential!r} {[credential]}"
        assert credential.source in repr(credential)
        assert pickle.loads(pickle.dumps(credential)) == credential
    assert "secret" not in repr(record())


@pytest.mark.parametrize("letter", [" ", "\n", "\r", "\t", "\x00", "\x7f", "\xe9", "\u20ac"])
@pytest.mark.parametrize("shape", ["{}tml-a", "tml-{}a", "tml-a{}"])
def test_malformed_key_is_rejected_without_showing_it(shape: str, letter: str) -> None:
    key = shape.format(letter)
    with pytest.raises(ConfigError) as caught:
        find_credential(key, Environment())
    assert "api_key argument" in str(caught.value)
    assert key not in str(caught.value)
    assert "tml" not in str(caught.value)


def test_key_must_be_string() -> None:
    number: Any = 12345
    with pytest.raises(ConfigError, match="must be a string, got int"):
        find_credential(number, Environment())


def test_unknown_key_prefix_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        found = find_credential("odd-key-for-a-warning", Environment())
        assert found is not None
        assert found.value == "odd-key-for-a-warning"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "odd-key" not in caplog.text
    assert "api_key argument" in caplog.text


def test_known_key_prefixes_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for key in (KEY, make_jwt(exp=1)):
        found = find_credential(key, Environment())
        assert found is not None
        assert found.is_jwt == key.startswith("eyJ")
    assert not caplog.records


def test_store_writes_official_format(store: CredentialStore) -> None:
    details = {"org_details": {"name": "o"}, "user_details": {"email": "e"}}
    store.add("k1", KeyRecord(key="tml-1", name="one", details=details))
    store.add("k2", KeyRecord(key="tml-2", name="two", note="n"), make_default=False)
    assert json.loads(store.path.read_bytes()) == {
        "version": 1,
        "default": "k1",
        "keys": {
            "k1": {"type": "manual", "key": "tml-1", "name": "one", "details": details},
            "k2": {"type": "manual", "key": "tml-2", "name": "two", "note": "n"},
        },
    }
    assert store.read().keys["k2"] == KeyRecord(key="tml-2", name="two", note="n")


def test_store_is_readable_by_owner_only(store: CredentialStore) -> None:
    store.add("k1", record())
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    store.path.chmod(0o644)
    store.add("k2", record())
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    left = {path.name for path in store.path.parent.iterdir()}
    assert left == {"credentials.json", ".credentials.json.lock"}


def test_removed_key_is_not_the_default(store: CredentialStore) -> None:
    store.add("k1", record("tml-1"))
    store.add("k2", record("tml-2"))
    assert store.remove("k2") is True
    assert store.remove("k2") is False
    assert store.read().default is None
    assert set(store.read().keys) == {"k1"}


def test_unknown_fields_survive_update(store: CredentialStore) -> None:
    store.add("k1", record())
    raw = json.loads(store.path.read_bytes())
    raw["extra"] = raw["keys"]["k1"]["added_later"] = "kept"
    store.path.write_text(json.dumps(raw))
    store.add("k2", record())
    raw = json.loads(store.path.read_bytes())
    assert raw["extra"] == raw["keys"]["k1"]["added_later"] == "kept"


def test_concurrent_writers_lose_nothing(store: CredentialStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: CredentialStore(store.path).add(f"k{n}", record()), range(24)))
    assert set(store.read().keys) == {f"k{n}" for n in range(24)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tml-leak",
        "[]",
        '{"version": 2, "keys": {}}',
        '{"version": 1, "keys": []}',
        '{"version": 1, "keys": {"a": {"key": 5, "name": "tml-leak"}}}',
        '{"version": 1, "keys": {"a": {"type": "tml-leak", "key": "k", "name": "n"}}}',
        "\udcff",
    ],
)
def test_invalid_file_error_shows_path_only(store: CredentialStore, text: str) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(text.encode(errors="surrogateescape"))
    store.path.chmod(0o600)
    before = store.path.read_bytes()
    for action in (
        store.read,
        lambda: store.add("k", record()),
        lambda: find_credential(None, Environment(credentials_file=store.path)),
    ):
        with pytest.raises(ConfigError, match="credentials file of version 1") as caught:
            action()
        assert str(store.path) in str(caught.value)
        assert "leak" not in str(caught.value)
    assert store.path.read_bytes() == before


def test_directory_at_store_path_is_config_error(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").mkdir()
    with pytest.raises(ConfigError, match=r"Cannot read .*credentials\.json"):
        CredentialStore(tmp_path / "credentials.json").read()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Cannot write .*credentials\.json"):
        CredentialStore(tmp_path / "file" / "credentials.json").add("k", record())


def test_invalid_key_is_not_stored(store: CredentialStore) -> None:
    with pytest.raises(ConfigError):
        store.add("k", record("tml- x"))
    with pytest.raises(InvalidInput):
        store.add("", record())
    assert not store.path.exists()


def test_permissive_file_mode_is_warned_about_once(
    store: CredentialStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.add("k1", record())
    assert not caplog.records
    store.path.chmod(0o640)
    for _ in range(3):
        store.read()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "mode 0640" in caplog.text


def test_jwt_claims_are_decoded() -> None:
    claims = {"exp": 5, "email": "\xe9@x", "n": "??>>"}
    assert decode_jwt_claims(make_jwt(**claims)) == claims


@pytest.mark.parametrize("text", ["", "eyJ", "a.b", "a.!!.c", "a.e30=.c.d", "a.bm8.c", "a.W10.c"])
def test_invalid_jwt_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="JWT"):
        decode_jwt_claims(text)


def number(token: str) -> object:
    return decode_jwt_claims(token)["n"]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_concurrent_callers_share_one_exchange() -> None:
    exchange = Exchange()
    exchange.gate = asyncio.Event()
    source = exchange.source()
    callers = [asyncio.create_task(source.get()) for _ in range(20)]
    await settle()
    exchange.gate.set()
    assert {number(token) for token in await asyncio.gather(*callers)} == {1}
    assert exchange.seen == [KEY]


@pytest.mark.asyncio
async def test_renewal_is_background_first_then_blocking() -> None:
    exchange = Exchange()
    source = exchange.source()
    assert number(await source.get()) == 1
    exchange.now += 3600 - 301
    assert number(await source.get()) == 1
    await settle()
    assert len(exchange.seen) == 1
    exchange.now += 1
    assert number(await source.get()) == 1
    await settle()
    assert len(exchange.seen) == 2
    assert number(await source.get()) == 2
    exchange.now += 3600 - 60
    assert number(await source.get()) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("skew_hours", [-28, -2, 2, 28])
async def test_token_lifetime_with_clock_skew(
    skew_hours: int,
) -> None:
    exchange = Exchange()

    async def skewed(raw: str) -> str:
        exchange.seen.append(raw)
        theirs = exchange.now + skew_hours * 3600
        return make_jwt(iat=theirs, exp=theirs + 3600, n=len(exchange.seen))

    source = TokenSource(Credential(source="argument", value=KEY), skewed, clock=exchange.clock)
    for _ in range(3):
        assert number(await source.get()) == 1
    exchange.now += 3600 - 60
    assert number(await source.get()) == 2


@pytest.mark.asyncio
async def test_failed_renewal_keeps_token_and_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange()
    source = exchange.source()
    await source.get()
    exchange.error = ConnectionError(f"no way with {KEY}")
    exchange.now += 3600 - 290
    for _ in range(3):
        assert number(await source.get()) == 1
        await settle()
    assert len(exchange.seen) == 2
    assert "Renewing the token failed: no way with ***" in caplog.text
    assert KEY not in caplog.text
    exchange.now += 59
    assert number(await source.get()) == 1
    await settle()
    assert len(exchange.seen) == 2
    exchange.now += 1
    exchange.error = None
    assert number(await source.get()) == 1
    await settle()
    assert number(await source.get()) == 3


@pytest.mark.asyncio
async def test_failed_blocking_renewal_uses_valid_token() -> None:
    exchange = Exchange()
    source = exchange.source()
    await source.get()
    exchange.error = ConnectionError("down")
    exchange.now += 3600 - 30
    assert number(await source.get()) == 1
    assert number(await source.get()) == 1
    assert len(exchange.seen) == 2
    exchange.now += 31
    with pytest.raises(ConnectionError, match="down"):
        await source.get()
    exchange.error = None
    assert number(await source.get()) == 4


@pytest.mark.asyncio
async def test_failed_first_exchange_reaches_all_callers() -> None:
    exchange = Exchange()
    exchange.error = ConnectionError("down")
    source = exchange.source()
    results = await asyncio.gather(source.get(), source.get(), return_exceptions=True)
    assert [str(result) for result in results] == ["down", "down"]
    assert len(exchange.seen) == 1


@pytest.mark.asyncio
async def test_cancelled_caller_does_not_affect_others() -> None:
    exchange = Exchange()
    exchange.gate = asyncio.Event()
    source = exchange.source()
    leaving, staying = asyncio.create_task(source.get()), asyncio.create_task(source.get())
    await settle()
    leaving.cancel()
    await settle()
    exchange.gate.set()
    assert number(await staying) == 1
    assert leaving.cancelled()


@pytest.mark.asyncio
@pytest.mark.parametrize("token", ["nonsense", make_jwt(sub="me"), make_jwt(exp="soon"), ""])
async def test_token_without_expiry_is_response_error(token: str) -> None:
    async def exchange(_: str) -> str:
        return token

    source = TokenSource(Credential(source="argument", value=KEY), exchange)
    with pytest.raises(APIResponseValidationError, match="expiry"):
        await source.get()


@pytest.mark.asyncio
async def test_close_ends_waiting_callers() -> None:
    exchange = Exchange()
    exchange.gate = asyncio.Event()
    source = exchange.source()
    waiting = asyncio.create_task(source.get())
    await settle()
    await source.close()
    with pytest.raises(ClientClosed):
        await waiting
    with pytest.raises(ClientClosed):
        await source.get()
    await exchange.source().close()


@pytest.mark.parametrize(
    ("text", "secrets", "expected"),
    [
        ("key=hunter2 again hunter2", ["hunter2"], "key=*** again ***"),
        ("ab abc", ["ab", "abc"], "*** ***"),
        ("nothing", ["", "x"], "nothing"),
        (f"x-api-key: {KEY}, next", [], "x-api-key: ***, next"),
        (f"'{make_jwt(exp=1)}'", [], "'***'"),
        ("url?key=tml-a%2Bbcd&x=1", [], "url?key=***&x=1"),
    ],
)
def test_redact(text: str, secrets: list[str], expected: str) -> None:
    assert redact(text, secrets) == expected
