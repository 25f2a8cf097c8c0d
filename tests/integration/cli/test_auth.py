"""`auth login`, `logout`, `status` and `whoami` against a server."""

from __future__ import annotations

import io
import os
import pty
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli
from tests.integration.conftest import KEY, TIMEOUT_SECONDS, Serve
from tinkex import ServiceClient
from tinkex.client.config import Config
from tinkex.client.credentials import CredentialStore, KeyRecord
from tinkex.testing import Fault, StubServer


@pytest.fixture
def guarded(serve: Serve) -> StubServer:
    return serve(api_keys={KEY})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".tinkex" / "config.toml"


def login(tinkex: RunCli, server: StubServer, *words: str, key: str = KEY) -> dict[str, object]:
    result = tinkex("auth", "login", "--base-url", server.url, "--api-key", key, "--json", *words)
    found: dict[str, object] = result.json
    return found


def test_login_verifies_and_stores_key_for_sdk(
    guarded: StubServer, tinkex: RunCli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"  {KEY}\n"))
    result = tinkex("auth", "login", "--base-url", guarded.url, "--api-key-stdin")
    assert (result.exit_code, result.out) == (0, "")
    assert "user@example.com" in result.err
    assert KEY not in result.err
    assert len(guarded.calls("get_api_key")) == 1
    assert tomllib.loads(file.read_text()) == {
        "default_profile": "default",
        "profiles": {"default": {"base_url": guarded.url, "api_key": KEY}},
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Config.new().api_key == KEY
    with ServiceClient() as client:
        assert client.get_server_capabilities().supported_models


def test_rejected_key_is_not_stored(guarded: StubServer, tinkex: RunCli, file: Path) -> None:
    words = ("auth", "login", "--base-url", guarded.url, "--api-key", "tml-wrong", "--json")
    refused = tinkex(*words)
    assert (refused.exit_code, file.exists()) == (1, False)
    assert refused.failure["message"] == f"{guarded.url} rejected this key, so it was not stored"


def test_unreachable_server_stores_nothing(tinkex: RunCli, file: Path) -> None:
    words = ("auth", "login", "--base-url", "http://127.0.0.1:9", "--api-key", KEY)
    failed = tinkex(*words)
    assert (failed.exit_code, file.exists()) == (1, False)
    assert "Connection failed" in failed.err


def test_login_on_server_without_key_names(guarded: StubServer, tinkex: RunCli) -> None:
    guarded.inject("get_api_key", Fault(status=404), times=None)
    found = login(tinkex, guarded)
    assert (found["email"], found["profile"]) == (None, "default")
    refused = tinkex("auth", "login", "--base-url", guarded.url, "--api-key", "tml-x", "--json")
    assert "rejected this key" in refused.failure["message"]


@pytest.mark.parametrize("text", ["", " \n"])
def test_login_without_key_fails(
    text: str, guarded: StubServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    refused = tinkex("auth", "login", "--base-url", guarded.url, "--api-key-stdin", "--json")
    assert "no key was given" in refused.failure["message"]
    monkeypatch.setattr(sys, "stdin", None)
    refused = tinkex("auth", "login", "--base-url", guarded.url, "--json")
    assert "not a terminal" in refused.failure["message"]
    assert "--api-key-stdin" in refused.failure["hint"]
    assert guarded.calls() == []


def type_in(server: StubServer, typed: bytes, last: bytes) -> tuple[int, bytes]:
    """Type a text at the prompt of a terminal, and return the output up to `last`."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", "auth", "login", "--base-url", server.url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        shown = _read_until(ours, b"API key for ")
        os.write(ours, typed)
        shown += _read_until(ours, last)
        return process.wait(TIMEOUT_SECONDS), shown
    finally:
        os.close(ours)


def test_typed_key_is_not_echoed(guarded: StubServer, file: Path) -> None:
    code, shown = type_in(guarded, KEY.encode() + b"\n", b"Logged in")
    assert (code, KEY.encode() in shown) == (0, False)
    assert KEY in file.read_text()


def test_empty_prompt_stores_nothing(guarded: StubServer, file: Path) -> None:
    # Ctrl-D ends the input without a key.
    code, _ = type_in(guarded, b"\x04", b"no key was given")
    assert (code, file.exists()) == (1, False)


def _read_until(descriptor: int, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        found += os.read(descriptor, 1024)
    return found


def test_several_profiles_and_the_default_one(
    guarded: StubServer, serve: Serve, tinkex: RunCli
) -> None:
    other = serve(api_keys={"tml-other-key"})
    assert login(tinkex, guarded)["default"] is True
    second = login(tinkex, other, "--profile", "work", key="tml-other-key")
    assert second["default"] is False
    assert "--profile work" in str(second["warning"])
    assert tinkex("auth", "status", "--json").json["base_url"] == guarded.url
    found = tinkex("auth", "status", "--json", "--profile", "work").json
    assert (found["base_url"], found["profile"]) == (other.url, "work")
    third = login(tinkex, other, "--profile", "work", "--default", key="tml-other-key")
    assert (third["default"], "warning" in third) == (True, False)
    assert tinkex("auth", "status", "--json").json["base_url"] == other.url


def test_default_profile_keeps_its_server(
    guarded: StubServer, serve: Serve, tinkex: RunCli, file: Path
) -> None:
    login(tinkex, guarded)
    other = serve(api_keys={KEY})
    words = ("auth", "login", "--base-url", other.url, "--api-key", KEY)
    refused = tinkex(*words)
    assert refused.exit_code == 1
    assert f"profile 'default' is for {guarded.url}, not for {other.url}" in refused.err
    assert guarded.url in file.read_text()
    assert tinkex(*words, "--profile", "default").exit_code == 0
    assert other.url in file.read_text()


def test_login_preserves_file_content(guarded: StubServer, tinkex: RunCli, file: Path) -> None:
    file.parent.mkdir()
    text = f"""\
# Mine.
default_profile = "a"

[profiles.a]  # the first
base_url = "{guarded.url}"  # here
"""
    file.write_text(text)
    file.chmod(0o644)
    login(tinkex, guarded)
    assert file.read_text() == text + f'api_key = "{KEY}"\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert tinkex("auth", "logout").exit_code == 0
    assert file.read_text() == text.replace('default_profile = "a"\n', "")
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f".{file.name}.lock"}


def test_symlinked_and_invalid_profiles_file(
    guarded: StubServer, tinkex: RunCli, file: Path, tmp_path: Path
) -> None:
    file.parent.mkdir()
    (tmp_path / "dotfiles.toml").write_text("")
    file.symlink_to(tmp_path / "dotfiles.toml")
    login(tinkex, guarded)
    assert file.is_symlink()
    assert KEY in (tmp_path / "dotfiles.toml").read_text()
    file.write_text("not = toml = at all")
    refused = tinkex("auth", "login", "--base-url", guarded.url, "--api-key", KEY)
    assert (refused.exit_code, "is not a valid TOML file" in refused.err) == (1, True)
    assert file.read_text() == "not = toml = at all"


def test_login_warns_about_overriding_variable(
    guarded: StubServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-variable")
    assert "TINKER_API_KEY is set" in str(login(tinkex, guarded)["warning"])


# --- logout -------------------------------------------------------------------------------------


def test_logout_deletes_key_and_keeps_server(
    guarded: StubServer, tinkex: RunCli, file: Path
) -> None:
    login(tinkex, guarded)
    result = tinkex("auth", "logout", "--json").json
    assert result == {"profiles": ["default"], "path": str(file), "revoked": False}
    assert tomllib.loads(file.read_text())["profiles"] == {"default": {"base_url": guarded.url}}
    again = tinkex("auth", "logout", "--json")
    assert (again.exit_code, "not logged in" in again.failure["message"]) == (1, True)
    assert guarded.calls("delete_api_key") == []


def test_logout_returns_to_local_server(guarded: StubServer, tinkex: RunCli, file: Path) -> None:
    login(tinkex, guarded)
    assert tinkex("auth", "status", "--json").json["base_url"] == guarded.url
    result = tinkex("auth", "logout")
    assert "Commands use the local server again." in result.err + result.out
    assert Config.new().local_home == file.parent
    # The profile keeps its server for the next login.
    again = tinkex("auth", "login", "--api-key", KEY, "--json").json
    assert again["base_url"] == guarded.url


def test_logout_all_deletes_and_revokes_keys(
    guarded: StubServer, tinkex: RunCli, file: Path
) -> None:
    login(tinkex, guarded)
    assert tinkex("auth", "logout", "--revoke", "--all").exit_code == 0
    assert len(guarded.calls("delete_api_key")) == 1
    words = ("run", "list", "--base-url", guarded.url, "--api-key", KEY, "--json")
    assert tinkex(*words).failure["status"] == 401


def test_logout_deletes_official_key(
    guarded: StubServer, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CredentialStore(tmp_path / ".tinker" / "credentials.json")
    store.add("7", KeyRecord(key=KEY, name="laptop"))
    monkeypatch.setenv("TINKER_BASE_URL", guarded.url)
    assert tinkex("auth", "status", "--json").json["source"] == "credentials file"
    result = tinkex("auth", "logout", "--json").json
    assert (result["key_name"], result["path"]) == ("laptop", str(store.path))
    assert store.read().keys == {}


# --- status and whoami ----------------------------------------------------------------------------


def test_status_with_valid_key(guarded: StubServer, tinkex: RunCli, file: Path) -> None:
    login(tinkex, guarded)
    found = tinkex("auth", "status", "--json").json
    assert found == {
        "credentials_available": True,
        "accessible": True,
        "base_url": guarded.url,
        "profile": "default",
        "key": "***",
        "source": f"profile 'default' in {file}",
        "error": None,
    }
    assert KEY not in tinkex("auth", "status").out


def test_status_with_problems(guarded: StubServer, tinkex: RunCli, tmp_path: Path) -> None:
    for words, text in (
        (("--base-url", guarded.url, "--api-key", "tml-no"), "from --api-key"),
        (("--base-url", "http://127.0.0.1:9", "--api-key", KEY), "Connection failed"),
        ((), "The local server is not running"),
    ):
        result = tinkex("auth", "status", *words)
        assert (result.exit_code, text in result.out) == (1, True), result
    # `auth status` does not start a server.
    assert not (tmp_path / ".tinkex").exists()


def test_whoami_with_user_tokens(serve: Serve, tinkex: RunCli) -> None:
    server = serve(api_keys={KEY}, client_config={"pjwt_auth_enabled": True})
    where = ("--base-url", server.url, "--api-key", KEY)
    found = tinkex("auth", "whoami", *where, "--json").json
    assert set(found) == {"user_urn", "org_urn", "email"}
    assert found["user_urn"] in tinkex("auth", "whoami", *where).out


def test_whoami_with_plain_keys(guarded: StubServer, tinkex: RunCli) -> None:
    where = ("--base-url", guarded.url, "--api-key", KEY)
    found = tinkex("auth", "whoami", *where, "--json").json
    assert (found["user_urn"], found["email"]) == (None, "user@example.com")
    assert found["organization"] == "user@example.com"
    assert "stub key" in tinkex("auth", "whoami", *where).out
    guarded.inject("get_api_key", Fault(status=404), times=None)
    failed = tinkex("auth", "whoami", *where, "--json")
    assert "cannot identify you" in failed.failure["message"]
