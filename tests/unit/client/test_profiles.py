"""Profiles: what they may say, who is stronger, and that a key never goes astray."""

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
    told = {"HOME": str(file.parent), "TINKEX_HOME": str(file.parent)}
    return Config.new(environ=told | (environ or {}), **options)


def test_the_files_own_default_is_used(file: Path) -> None:
    config = new(file)
    assert (config.base_url, config.api_key, config.profile) == ("http://home", "tml-home", "home")
    assert config.key_source == f"profile 'home' in {file}"
    assert config.local_home is None


def test_a_variable_names_another_and_an_option_wins_over_it(file: Path) -> None:
    assert new(file, {"TINKEX_PROFILE": "work"}).profile == "work"
    config = new(file, {"TINKEX_PROFILE": "home"}, profile="work")
    assert (config.base_url, config.project_id) == ("https://work/prefix", "p-1")
    assert config.timeout_seconds == 7


def test_variables_win_over_a_profile_that_nobody_chose(file: Path) -> None:
    told = {"TINKER_BASE_URL": "http://env", "TINKER_API_KEY": "tml-env"}
    config = new(file, told)
    assert (config.base_url, config.api_key, config.key_source) == ("http://env", "tml-env", "")


def test_a_profile_that_was_chosen_here_wins_over_variables(file: Path) -> None:
    told = {"TINKER_BASE_URL": "http://env", "TINKER_API_KEY": "tml-env"}
    config = new(file, told, profile="work")
    assert (config.base_url, config.api_key) == ("https://work/prefix", "tml-work")


def test_options_win_over_every_profile(file: Path) -> None:
    config = new(file, profile="work", base_url="http://flag", api_key="tml-flag")
    assert (config.base_url, config.api_key, config.key_source) == ("http://flag", "tml-flag", "")


@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_key_of_a_default_profile_goes_to_its_own_server_only(file: Path, by: str) -> None:
    if by == "option":
        config = new(file, base_url="http://other")
    else:
        config = new(file, {"TINKEX_BASE_URL": "http://other"})
    assert (config.base_url, config.api_key, config.key_source) == ("http://other", None, "")


def test_a_command_that_prints_a_key_is_not_outdone_by_a_default(file: Path) -> None:
    assert new(file, {"TINKER_CREDENTIAL_CMD": "echo x"}).api_key is None


def test_without_a_server_a_key_is_for_the_hosted_one_and_without_both_there_is_the_local_one(
    file: Path,
) -> None:
    assert new(file, profile="hosted").base_url == HOSTED_BASE_URL
    assert new(file, profile="keyless").local_home is None
    file.unlink()
    assert new(file).local_home == file.parent


def test_a_profile_that_is_not_there_lists_those_that_are(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"'x' in .*; there is: home, hosted, keyless, work"):
        new(file, profile="x")
    file.unlink()
    with pytest.raises(ConfigError, match="there is: none"):
        new(file, profile="x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[profiles.x", "is not a valid TOML file"),
        ("profiles = 3", "has no profiles"),
        ("default_profile = 3", "has no profiles"),
        ("[profiles]\nx = 3", "profiles.x is no table"),
        ("[profiles.x]\nurl = 'http://h'", "has 'url'; a profile has base_url, api_key"),
        ("[profiles.x]\napi_key = 3", "'api_key' of profile 'x' must be text"),
        ("[profiles.x]\nbase_url = ''", "'base_url' of profile 'x' must be text"),
        ("[profiles.x]\ntimeout_seconds = true", "must be a number"),
    ],
)
def test_a_file_that_makes_no_sense_is_a_sentence(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        read_profiles(file)
    assert str(file) in str(refused.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary())
def test_any_bytes_are_read_or_refused_without_showing_them(file: Path, data: bytes) -> None:
    file.write_bytes(b"api_key = 'tml-secret\n" + data)
    with pytest.raises(ConfigError) as refused:
        read_profiles(file)
    assert "secret" not in str(refused.value)


def test_a_folder_in_the_way_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        read_profiles(tmp_path)
    assert "move it away" in (refused.value.hint or "")


def test_keys_are_no_part_of_any_text(file: Path) -> None:
    assert "tml-" not in repr(read_profiles(file)) + repr(new(file))
