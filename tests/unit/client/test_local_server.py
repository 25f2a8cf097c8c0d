"""When the local server is used, and errors when it cannot start."""

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


def test_local_home_is_used_without_url_and_key(environ: dict[str, str]) -> None:
    assert Config.new(environ=environ).local_home == Path(environ["HOME"]) / ".tinkex"
    environment = {**environ, "TINKEX_HOME": "/srv/tinkex"}
    assert Config.new(environ=environment).local_home == Path("/srv/tinkex")


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {"api_key": "tml-key"}),
        ({}, {"base_url": "http://somewhere"}),
        # An explicit URL of the hosted service is respected.
        ({}, {"base_url": HOSTED_BASE_URL}),
        ({"TINKER_API_KEY": "tml-key"}, {}),
        ({"TINKEX_API_KEY": "tml-key"}, {}),
        ({"TINKER_BASE_URL": "http://somewhere"}, {}),
        ({"TINKER_CREDENTIAL_CMD": "echo tml-key"}, {}),
    ],
)
def test_server_or_key_disables_local_server(
    environ: dict[str, str], variables: dict[str, str], options: dict[str, Any]
) -> None:
    config = Config.new(environ={**environ, **variables}, **options)
    assert with_local_server(config) is config
    assert not (Path(environ["HOME"]) / ".tinkex").exists()


def test_stored_key_disables_local_server(environ: dict[str, str]) -> None:
    config = Config.new(environ=environ)
    stored = {"version": 1, "default": "a", "keys": {"a": {"key": "tml-stored", "name": "a"}}}
    config.environment.credentials_file.parent.mkdir()
    config.environment.credentials_file.touch(mode=0o600)
    config.environment.credentials_file.write_bytes(msgspec.json.encode(stored))
    assert with_local_server(config) is config


def test_config_without_environment_starts_no_server() -> None:
    assert Config(environment=Environment()).local_home is None
    config = Config()
    assert with_local_server(config) is config


@pytest.mark.parametrize("library", ["litestar", "sqlalchemy", "uvicorn"])
def test_missing_library_error_shows_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    # None in sys.modules makes the import of a module fail.
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"a local server needs {library}") as caught:
        ensure_server(Home(tmp_path))
    assert install_command("server", "torch") in (caught.value.hint or "")


def test_all_missing_libraries_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKEX_ENGINE", raising=False)
    for library in ("uvicorn", "torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match="needs uvicorn, torch, transformers"):
        ensure_server(Home(tmp_path))


def test_unwritable_home_is_config_error(tmp_path: Path) -> None:
    home = Home(tmp_path)
    # A directory in place of a file fails for every user, including root.
    home.start_lock.mkdir()
    with pytest.raises(
        ConfigError, match=f"start a local server in {tmp_path}: Is a directory"
    ) as caught:
        ensure_server(home)
    assert "TINKEX_HOME" in (caught.value.hint or "")
