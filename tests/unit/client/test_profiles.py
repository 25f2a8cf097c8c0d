"""Profiles: settings, precedence, and keys that are sent to their own server only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.client.config import Config
from tinkex.client.profiles import read_profiles
from tinkex.errors import ConfigError
from tinkex.settings import HOSTED_BASE_URL

FILE = """
default_profile = "home"
[profiles.home]
base_url = "http://home"
api_key = "tml-home"
[profiles.work]
base_url = "https://work/prefix/"
api_key = "tml-work"
project_id = "p-1"
timeout_seconds = 7
[profiles.keyless]
base_url = "http://keyless"
[profiles.hosted]
api_key = "tml-hosted"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def new(file: Path, environ: dict[str, str] | None = None, **options: Any) -> Config:
    variables = {"HOME": str(file.parent), "TINKEX_HOME": str(file.parent)}
    return Config.new(environ=variables | (environ or {}), **options)


def test_default_profile_of_file_is_used(file: Path) -> None:
    config = new(file)
    assert (config.base_url, config.api_key, config.profile) == ("http://home", "tml-home", "home")
    assert config.key_source == f"profile 'home' in {file}"
    assert config.local_home is None


def test_variable_selects_profile_and_option_overrides_it(file: Path) -> None:
    assert new(file, {"TINKEX_PROFILE": "work"}).profile == "work"
    config = new(file, {"TINKEX_PROFILE": "home"}, profile="work")
    assert (config.base_url, config.project_id) == ("https://work/prefix", "p-1")
    assert config.timeout_seconds == 7


def test_variables_override_default_profile(file: Path) -> None:
    variables = {"TINKER_BASE_URL": "http://env", "TINKER_API_KEY": "tml-env"}
    config = new(file, variables)
    assert (config.base_url, config.api_key, config.key_source) == ("http://env", "tml-env", "")


def test_explicit_profile_overrides_variables(file: Path) -> None:
    variables = {"TINKER_BASE_URL": "http://env", "TINKER_API_KEY": "tml-env"}
    config = new(file, variables, profile="work")
    assert (config.base_url, config.api_key) == ("https://work/prefix", "tml-work")


def test_options_override_every_profile(file: Path) -> None:
    config = new(file, profile="work", base_url="http://flag", api_key="tml-flag")
    assert (config.base_url, config.api_key, config.key_source) == ("http://flag", "tml-flag", "")


@pytest.mark.parametrize("by", ["option", "variable"])
def test_default_profile_key_is_sent_to_its_server_only(file: Path, by: str) -> None:
    if by == "option":
        config = new(file, base_url="http://other")
    else:
        config = new(file, {"TINKEX_BASE_URL": "http://other"})
    assert (config.base_url, config.api_key, config.key_source) == ("http://other", None, "")


def test_credential_command_overrides_default_profile_key(file: Path) -> None:
    assert new(file, {"TINKER_CREDENTIAL_CMD": "echo x"}).api_key is None


def test_profile_without_base_url_uses_hosted_or_local_server(
    file: Path,
) -> None:
    assert new(file, profile="hosted").base_url == HOSTED_BASE_URL
    assert new(file, profile="keyless").local_home is None
    file.unlink()
    assert new(file).local_home == file.parent


def test_unknown_profile_error_lists_profiles(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"'x' in .*; known: home, hosted, keyless, work"):
        new(file, profile="x")
    file.unlink()
    with pytest.raises(ConfigError, match="known: none"):
        new(file, profile="x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profiles.x", "is not a valid TOML file"),
        ("profiles = 3", "is not a file of profiles"),
        ("default_profile = 3", "is not a file of profiles"),
        ("[profiles]\nx = 3", "profiles.x is not a table"),
        (
            "[profiles.x]\nurl = 'http://h'",
            "unknown setting 'url' in profile 'x'; known: base_url, api_key",
        ),
        ("[profiles.x]\napi_key = 3", "'api_key' of profile 'x' must be a string"),
        ("[profiles.x]\nbase_url = ''", "'base_url' of profile 'x' must be a string"),
        ("[profiles.x]\ntimeout_seconds = true", "must be a number"),
    ],
)
def test_invalid_profiles_file_is_config_error(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_profiles(file)
    assert str(file) in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary())
def test_any_profiles_file_is_read_or_rejected_without_showing_it(file: Path, data: bytes) -> None:
    file.write_bytes(b"api_key = 'tml-secret\n" + data)
    with pytest.raises(ConfigError) as caught:
        read_profiles(file)
    assert "secret" not in str(caught.value)


def test_directory_at_profiles_path_is_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_profiles(tmp_path)
    assert "move it away" in (caught.value.hint or "")


def test_repr_shows_no_key(file: Path) -> None:
    assert "tml-" not in repr(read_profiles(file)) + repr(new(file))
