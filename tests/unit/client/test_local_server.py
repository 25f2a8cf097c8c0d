"""When this machine's own server is used, and when nobody may even look for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tinkex.client.config import Config
from tinkex.client.local_server import ensure_server, with_local_server
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.installation import install_command
from tinkex.settings import HOSTED_BASE_URL, Environment


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_with_neither_url_nor_key_the_home_of_this_machine_counts(environ: dict[str, str]) -> None:
    assert Config.new(environ=environ).local_home == Path(environ["HOME"]) / ".tinkex"
    told = {**environ, "TINKEX_HOME": "/srv/tinkex"}
    assert Config.new(environ=told).local_home == Path("/srv/tinkex")


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {"api_key": "tml-key"}),
        ({}, {"base_url": "http://somewhere"}),
        # Who names the hosted service wants the hosted service.
        ({}, {"base_url": HOSTED_BASE_URL}),
        ({"TINKER_API_KEY": "tml-key"}, {}),
        ({"TINKEX_API_KEY": "tml-key"}, {}),
        ({"TINKER_BASE_URL": "http://somewhere"}, {}),
        ({"TINKER_CREDENTIAL_CMD": "echo tml-key"}, {}),
    ],
)
def test_who_names_a_server_or_a_key_gets_nothing_else(
    environ: dict[str, str], variables: dict[str, str], options: dict[str, Any]
) -> None:
    config = Config.new(environ={**environ, **variables}, **options)
    assert with_local_server(config) is config
    assert not (Path(environ["HOME"]) / ".tinkex").exists()


def test_a_stored_key_counts_as_a_key(environ: dict[str, str]) -> None:
    config = Config.new(environ=environ)
    stored = {"version": 1, "default": "a", "keys": {"a": {"key": "tml-stored", "name": "a"}}}
    config.environment.credentials_file.parent.mkdir()
    config.environment.credentials_file.touch(mode=0o600)
    config.environment.credentials_file.write_bytes(msgspec.json.encode(stored))
    assert with_local_server(config) is config


def test_a_config_that_was_made_without_an_environment_looks_for_nothing() -> None:
    assert Config(environment=Environment()).local_home is None
    config = Config()
    assert with_local_server(config) is config


@pytest.mark.parametrize("library", ["litestar", "sqlalchemy", "uvicorn"])
def test_without_the_servers_libraries_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    # None in the table of modules is how Python says that a module cannot be imported.
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"a local server needs {library}") as refused:
        ensure_server(Home(tmp_path))
    assert install_command("server", "torch") in (refused.value.hint or "")


def test_everything_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKEX_ENGINE", raising=False)
    for library in ("uvicorn", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match="needs uvicorn, torch, transformers, not installed"):
        ensure_server(Home(tmp_path))


def test_a_home_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    home = Home(tmp_path)
    # A directory where a file has to be stops everybody, root too.
    home.start_lock.mkdir()
    with pytest.raises(ConfigError, match=f"started in {tmp_path}: Is a directory") as refused:
        ensure_server(home)
    assert "TINKEX_HOME" in (refused.value.hint or "")
