"""Environment variables; empty ones count as unset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.settings import (
    Environment,
    child_environment,
    package_version,
    read_environment,
    read_variables,
)

EVERYTHING = {
    "HOME": "/home/me",
    "TINKER_API_KEY": "tml-key",
    "TINKER_BASE_URL": "http://one",
    "TINKER_CREDENTIAL_CMD": "print-secret",
    "TINKER_PROJECT_ID": "p1",
    "TINKER_TAGS": "a, b,,a , c",
    "TINKER_LOG": "debug",
    "TINKEX_TELEMETRY": "1",
    "CLOUDFLARE_ACCESS_CLIENT_ID": "cf-id",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET": "cf-secret",
    "TINKEX_HOME": "/srv/tinkex",
    "TINKEX_KERNELS": "off",
}


def test_every_variable_is_read() -> None:
    assert read_environment(EVERYTHING) == Environment(
        api_key="tml-key",
        base_url="http://one",
        credential_command="print-secret",
        project_id="p1",
        tags=("a", "b", "c"),
        log_level="debug",
        telemetry=True,
        access_client_id="cf-id",
        access_client_secret="cf-secret",
        credentials_file=Path("/home/me/.tinker/credentials.json"),
        home=Path("/srv/tinkex"),
        kernels=False,
    )


def test_nothing_set_means_defaults() -> None:
    env = read_environment({"HOME": "/home/me"})
    assert env == Environment(
        credentials_file=Path("/home/me/.tinker/credentials.json"), home=Path("/home/me/.tinkex")
    )


def test_empty_and_blank_count_as_unset() -> None:
    blank = {name: "" if index % 2 else "  " for index, name in enumerate(EVERYTHING)}
    assert read_environment(blank | {"HOME": "/h"}) == read_environment({"HOME": "/h"})


def test_default_home_is_in_the_user_directory() -> None:
    assert read_environment({}).credentials_file.is_relative_to(Path.home())


@pytest.mark.parametrize(
    ("new", "old", "field"),
    [
        ("TINKEX_API_KEY", "TINKER_API_KEY", "api_key"),
        ("TINKEX_BASE_URL", "TINKER_BASE_URL", "base_url"),
    ],
)
def test_tinkex_variables_override_official_ones(new: str, old: str, field: str) -> None:
    assert getattr(read_environment({new: "ours", old: "theirs"}), field) == "ours"
    assert getattr(read_environment({new: " ", old: "theirs"}), field) == "theirs"
    assert getattr(read_environment({old: " theirs\n"}), field) == "theirs"


def test_api_key_variable_is_recorded() -> None:
    assert read_environment({"TINKEX_API_KEY": "k"}).api_key_variable == "TINKEX_API_KEY"
    assert read_environment({"TINKER_API_KEY": "k"}).api_key_variable == "TINKER_API_KEY"


def test_tinkex_log_wins_and_invalid_level_is_refused() -> None:
    assert read_environment({"TINKEX_LOG": "info", "TINKER_LOG": "debug"}).log_level == "info"
    with pytest.raises(
        ConfigError, match=r"TINKEX_LOG or TINKER_LOG must be one of debug.*got 'loud'"
    ):
        read_environment({"TINKER_LOG": "loud"})


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["1", "TRUE", "yes", "On"], True), (["0", "False", "no", "off", "", " "], False)],
)
def test_telemetry_variable_is_parsed_as_a_flag(texts: list[str], expected: bool) -> None:
    values = {read_environment({"TINKEX_TELEMETRY": text}).telemetry for text in texts}
    assert values == {expected}


def test_invalid_flag_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigError, match=r"TINKEX_TELEMETRY must be .*got 'Maybe'"):
        read_environment({"TINKEX_TELEMETRY": "Maybe"})


def test_official_telemetry_variable_is_ignored() -> None:
    # The official SDK enables telemetry by default; here only TINKEX_TELEMETRY enables it.
    assert read_environment({"TINKER_TELEMETRY": "1"}).telemetry is False


def test_home_is_absolute() -> None:
    assert read_environment({"TINKEX_HOME": "near"}).home == Path.cwd() / "near"
    assert read_environment({"TINKEX_HOME": "~/x"}).home.is_absolute()


def test_named_variables_are_read() -> None:
    environ = {"TINKEX_ONE": " 1 ", "TINKEX_TWO": " ", "TINKEX_OTHER": "3"}
    assert read_variables(["TINKEX_ONE", "TINKEX_TWO", "TINKEX_NO"], environ) == {"TINKEX_ONE": "1"}


def test_set_variables_override_child_defaults() -> None:
    environ = child_environment({"A": "default", "B": "default"}, {"B": "set", "C": "set"})
    assert environ == {"A": "default", "B": "set", "C": "set"}


def test_default_environment_is_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    # os.environ is the seam here, there is no other.
    monkeypatch.setenv("TINKER_PROJECT_ID", "from-the-process")
    assert read_environment().project_id == "from-the-process"


def test_repr_hides_secrets() -> None:
    shown = repr(read_environment(EVERYTHING))
    for secret in ("tml-key", "cf-secret", "print-secret"):
        assert secret not in shown
    assert "http://one" in shown


def test_environment_is_immutable() -> None:
    env = read_environment({})
    with pytest.raises(AttributeError):
        env.api_key = "other"  # type: ignore[misc]


def test_package_version_has_three_parts() -> None:
    assert package_version().count(".") >= 2


def test_home_of_unknown_user_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'~nobody-at-all/x': the user has no home directory here"
    ):
        read_environment({"HOME": "/h", "TINKEX_HOME": "~nobody-at-all/x"})
