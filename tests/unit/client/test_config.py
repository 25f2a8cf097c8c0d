"""Client settings: precedence, validation and immutability."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.client.config import Config, normalise_url
from tinkex.errors import ConfigError
from tinkex.settings import HOSTED_BASE_URL, Environment

KEY = "tml-secret-key"


def new(environ: Any = None, **options: Any) -> Config:
    return Config.new(environ=environ or {}, **options)


# --- precedence ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variable", "from_env", "option", "default"),
    [
        ("base_url", "TINKER_BASE_URL", "http://env", "http://option", HOSTED_BASE_URL),
        ("base_url", "TINKEX_BASE_URL", "http://env", "http://option", HOSTED_BASE_URL),
        ("api_key", "TINKER_API_KEY", "tml-env", "tml-option", None),
        ("project_id", "TINKER_PROJECT_ID", "env", "option", None),
    ],
)
def test_option_overrides_environment_overrides_default(
    name: str, variable: str, from_env: str, option: str, default: str | None
) -> None:
    assert getattr(new({variable: from_env}, **{name: option}), name) == option
    assert getattr(new({variable: from_env}), name) == from_env
    assert getattr(new({variable: from_env}, **{name: None}), name) == from_env
    assert getattr(new(), name) == default


@pytest.mark.parametrize("empty", ["", None])
def test_empty_value_counts_as_unset(empty: str | None) -> None:
    environ = {"TINKER_BASE_URL": "http://env", "TINKER_API_KEY": "tml-env"}
    config = new(environ, base_url=empty, api_key=empty, project_id=empty)
    assert (config.base_url, config.api_key, config.project_id) == ("http://env", "tml-env", None)
    config = new({"TINKER_BASE_URL": " ", "TINKER_API_KEY": ""}, base_url=empty)
    assert (config.base_url, config.api_key) == (HOSTED_BASE_URL, None)


def test_flags_and_tags_from_environment() -> None:
    environ = {"TINKEX_TELEMETRY": "1", "TINKER_TAGS": "a,b"}
    assert (new(environ).telemetry, new(environ).tags) == (True, ("a", "b"))
    # False and empty are values, not unset.
    config = new(environ, telemetry=False, tags=())
    assert (config.telemetry, config.tags) == (False, ())
    assert new(max_retries=0).max_retries == 0
    assert (new().telemetry, new().tags) == (False, ())


def test_environment_is_read_once() -> None:
    environ = {"TINKER_API_KEY": KEY, "CLOUDFLARE_ACCESS_CLIENT_ID": "cf"}
    config = new(environ)
    environ.clear()
    assert config.environment.access_client_id == "cf"
    given = Environment(api_key="tml-given")
    assert new({"TINKER_API_KEY": KEY}, environment=given).api_key == "tml-given"


def test_default_settings() -> None:
    config = new()
    assert (config.timeout_seconds, config.max_retries) == (60.0, 10)
    assert (config.poll_request_seconds, config.poll_timeout_seconds) == (45.0, None)
    assert (config.heartbeat_seconds, config.outage_seconds) == (10.0, 300.0)
    assert config.billing_pause_seconds is None
    # A wrong address is detected in seconds, not minutes.
    assert config.first_contact_seconds < 10.0


# --- checks -------------------------------------------------------------------------------


def test_unknown_setting_is_rejected_with_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"Unknown Config setting 'max_retry'.*max_retries"):
        new(max_retry=3)


@pytest.mark.parametrize(
    "name",
    [
        "timeout_seconds",
        "connect_timeout_seconds",
        "poll_request_seconds",
        "poll_timeout_seconds",
        "heartbeat_seconds",
        "max_connections",
        "max_concurrent_samples",
        "max_response_bytes",
        "max_unsized_download_bytes",
    ],
)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True])
def test_positive_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be more than 0, got {value!r}"):
        new(**{name: value})


@pytest.mark.parametrize(
    "name", ["max_retries", "first_contact_seconds", "outage_seconds", "billing_pause_seconds"]
)
def test_non_negative_settings_are_checked(name: str) -> None:
    for value in (-1, float("nan"), "5", True):
        with pytest.raises(ConfigError, match=f"{name} must be at least 0, got {value!r}"):
            new(**{name: value})
    assert getattr(new(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", ["max_retries", "max_connections", "max_response_bytes"])
def test_counts_must_be_integers(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be an integer, got 2\.5"):
        new(**{name: 2.5})


def test_download_limit_from_environment() -> None:
    variable = "TINKEX_MAX_UNSIZED_DOWNLOAD_BYTES"
    assert new({variable: "1000"}).max_unsized_download_bytes == 1000
    assert new({variable: "1000"}, max_unsized_download_bytes=5).max_unsized_download_bytes == 5
    for text in ("0", "-1", "1.5", "many", "9" * 30):
        with pytest.raises(ConfigError, match=f"{variable} must be a whole number"):
            new({variable: text})


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}])
def test_metadata_must_be_strings(metadata: Any) -> None:
    with pytest.raises(ConfigError, match="user_metadata must map strings to strings"):
        new(user_metadata=metadata)


@pytest.mark.parametrize("tags", ["a,b", [1], ["a", None]])
def test_tags_must_be_strings(tags: Any) -> None:
    with pytest.raises(ConfigError, match="tags must be a list of strings"):
        new(tags=tags)


# --- base URLs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host", "https://host"),
        ("https://host/", "https://host"),
        ("HTTPS://Host.Example//", "https://host.example"),
        ("http://host:8000/a/B/", "http://host:8000/a/B"),
        (" http://host ", "http://host"),
        ("http://[::1]:8000/x", "http://[::1]:8000/x"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1"),
    ],
)
def test_base_url_is_normalised(url: str, expected: str) -> None:
    assert normalise_url(url) == expected
    assert new(base_url=url).base_url == expected
    assert normalise_url(expected) == expected


@pytest.mark.parametrize(
    "url",
    [
        "host",
        "host:8000",
        "//host",
        "ftp://host",
        "http://",
        "http:///path",
        "http://ho st",
        "http://host/a b",
        "http://host\x7f",
        "http://ho\nst",
        "http://host?x=1",
        "http://host#f",
        "http://host:0",
        "http://host:99999",
        "http://host:x",
        "http://[::1",
        "http://ex\u2100.com",
        "  ",
    ],
)
def test_invalid_base_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        new(base_url=url)
    assert "base_url" in str(caught.value)
    assert repr(url.strip()).strip("'") in str(caught.value)


def test_password_in_base_url_is_rejected_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="must not contain a user name or password") as caught:
        new(base_url="https://me:hunter2@host")
    assert "hunter2" not in str(caught.value)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.text(max_size=20).map("http://".__add__) | st.text(max_size=20))
def test_any_base_url_is_accepted_or_config_error(text: str) -> None:
    try:
        url = normalise_url(text)
    except ConfigError:
        return
    assert normalise_url(url) == url
    assert url.startswith(("http://", "https://"))
    assert not url.endswith("/")


# --- the Config object --------------------------------------------------------------------


def test_config_is_immutable() -> None:
    config = new()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_retries = 5  # type: ignore[misc]


def test_config_copies_caller_data() -> None:
    headers, metadata, tags = {"a": "1"}, {"b": "2"}, ["c"]
    config = new(headers=headers, user_metadata=metadata, tags=tags)
    headers["x"] = metadata["x"] = "later"
    tags.append("later")
    assert (config.headers, config.user_metadata, config.tags) == ({"a": "1"}, {"b": "2"}, ("c",))


def test_evolve_checks_settings() -> None:
    config = new(base_url="http://one", api_key=KEY)
    other = config.evolve(base_url="http://two/", max_retries=1)
    assert (config.base_url, other.base_url) == ("http://one", "http://two")
    assert (other.api_key, other.max_retries) == (KEY, 1)
    with pytest.raises(ConfigError, match="timeout_seconds"):
        config.evolve(timeout_seconds=0)


def test_repr_shows_no_secret() -> None:
    environ = {"TINKER_API_KEY": KEY, "CLOUDFLARE_ACCESS_CLIENT_SECRET": "cf-secret"}
    shown = repr(new(environ, headers={"authorization": "header-secret"}))
    for secret in (KEY, "cf-secret", "header-secret"):
        assert secret not in shown
    assert "timeout_seconds=60.0" in shown


def test_config_can_be_pickled() -> None:
    config = new({"TINKER_API_KEY": KEY}, headers={"a": "b"}, user_metadata={"c": "d"})
    assert pickle.loads(pickle.dumps(config)) == config


def test_configs_are_independent() -> None:
    one = new({"TINKER_API_KEY": "tml-1"}, base_url="http://one", timeout_seconds=1)
    other = new({"TINKER_API_KEY": "tml-2"}, base_url="http://two")
    assert (one.api_key, one.base_url, one.timeout_seconds) == ("tml-1", "http://one", 1)
    assert (other.api_key, other.base_url, other.timeout_seconds) == ("tml-2", "http://two", 60.0)
