"""Server settings: precedence of flags, variables and file; errors of invalid values."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.server.config import TOOL_PARSERS, ServerConfig
from tinkex.server.config_sources import (
    FIELDS,
    decode_config,
    encode_config,
    read_config,
    read_from_file,
    read_from_variables,
    variable_name,
)
from tinkex.server.inference.tool_parsers import FAMILIES

HOME = {"HOME": "/nowhere"}


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text, "utf-8")
    return path


# --- precedence ---------------------------------------------------------------------------------


def test_precedence_of_flags_variables_and_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1001\nlong_poll_seconds = 3\n")
    environ = {**HOME, "TINKEX_PORT": "1002"}
    assert read_config({"port": 1003}, file, environ).port == 1003
    assert read_config({"port": None}, file, environ).port == 1002
    assert read_config({}, file, HOME).port == 1001
    assert read_config({}, None, HOME).port == 8000
    assert read_config({"port": 1003}, file, environ).long_poll_seconds == 3.0


def test_zero_is_not_treated_as_unset(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1001\nidle_stop_seconds = 5\n")
    config = read_config({"port": 0, "idle_stop_seconds": 0.0}, file, HOME)
    assert (config.port, config.idle_stop_seconds) == (0, 0.0)


def test_home_file_is_default(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text("port = 1001\n")
    other = toml(tmp_path, "host = 'localhost'\n")
    assert read_config({"home": tmp_path}, None, HOME).port == 1001
    assert read_config({}, None, {**HOME, "TINKEX_HOME": str(tmp_path)}).port == 1001
    assert read_config({"home": tmp_path}, other, HOME).port == 8000


def test_home_from_flag_variable_or_default() -> None:
    assert read_config({}, None, HOME).home == Path("/nowhere/.tinkex")
    environ = {**HOME, "TINKEX_HOME": "/variable"}
    assert read_config({}, None, environ).home == Path("/variable")
    assert read_config({"home": Path("/flag")}, None, environ).home == Path("/flag")
    assert read_config({"home": Path("near")}, None, environ).home == Path.cwd() / "near"


# --- variables ----------------------------------------------------------------------------------


def test_every_field_has_variable_and_docstring() -> None:
    source = inspect.getsource(ServerConfig)
    for row in fields(ServerConfig):
        assert variable_name(row.name).startswith("TINKEX_")
        after = source.split(f"    {row.name}: ", 1)[1].split("\n", 2)[1].strip()
        assert after.startswith('"""'), f"{row.name} has no sentence"
    assert len({variable_name(name) for name in FIELDS}) == len(FIELDS)


def test_variables_are_converted_to_field_types() -> None:
    settings = read_from_variables(
        {
            "TINKEX_PORT": "12",
            "TINKEX_JWT": "true",
            "TINKEX_GAP_SECONDS": "2.5",
            "TINKEX_MODELS": "a=/x, b ,",
            "TINKEX_CLIENT_FLAGS": '{"some_flag": true}',
            "TINKEX_LOG": "debug",
            "TINKEX_HOST": "  ",
        }
    )
    assert settings == {
        "port": 12,
        "jwt": True,
        "gap_seconds": 2.5,
        "models": ("a=/x", "b"),
        "client_flags": {"some_flag": True},
        "log_level": "debug",
    }


def test_client_key_variable_is_ignored() -> None:
    environ = {**HOME, "TINKEX_API_KEY": "tml-clients", "TINKER_API_KEY": "tml-clients"}
    assert read_config({}, None, environ).api_key == ""
    with_server_key = {**environ, "TINKEX_SERVER_API_KEY": "tml-servers"}
    assert read_config({}, None, with_server_key).api_key == "tml-servers"


def test_kubernetes_service_port_variable_is_ignored() -> None:
    environ = {**HOME, "TINKEX_PORT": "tcp://10.0.0.1:8000"}
    assert read_config({}, None, environ).port == 8000


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("TINKEX_PORT", "many", "port is 'many' in TINKEX_PORT; expected a whole number"),
        ("TINKEX_JWT", "maybe", "jwt is 'maybe' in TINKEX_JWT; expected true or false"),
        ("TINKEX_GAP_SECONDS", "x", "gap_seconds is 'x' in TINKEX_GAP_SECONDS; expected a number"),
        ("TINKEX_CLIENT_FLAGS", "{", "TINKEX_CLIENT_FLAGS is '{'; expected a JSON object"),
        ("TINKEX_CLIENT_FLAGS", "[]", r"client_flags is \[\] in TINKEX_CLIENT_FLAGS; .* a table"),
    ],
)
def test_invalid_variable_error_names_value(variable: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_from_variables({variable: text})


# --- the file -----------------------------------------------------------------------------------


def test_unknown_setting_error_suggests_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'prot'.*mean 'port'"):
        read_from_file(toml(tmp_path, "prot = 1"))
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'; known settings: host"):
        read_from_file(toml(tmp_path, "zzz = 1"))
    # The home contains the file, so the file cannot set it.
    with pytest.raises(ConfigError, match="unknown setting 'home'"):
        read_from_file(toml(tmp_path, "home = '/x'"))


def test_tables_and_lists(tmp_path: Path) -> None:
    text = "models = ['a=/x', 'b']\n[client_flags]\none = 1\n[dynamic_flags]\ntwo = 'x'\n"
    assert read_from_file(toml(tmp_path, text)) == {
        "models": ("a=/x", "b"),
        "client_flags": {"one": 1},
        "dynamic_flags": {"two": "x"},
    }


def test_samplers_are_named_per_base_model(tmp_path: Path) -> None:
    text = "samplers = { 'a/b' = 'vllm', c = 'trainer' }\nvllm_options = { max_lora_rank = 8 }\n"
    config = read_config({"home": tmp_path}, toml(tmp_path, text), {})
    assert config.vllm_models == {"a/b"} and config.vllm_options == {"max_lora_rank": 8}
    assert read_config({"home": tmp_path}, None, {}).vllm_models == frozenset()
    with pytest.raises(ConfigError, match="the sampler of c is 'vlm'; expected trainer or vllm"):
        read_config({"home": tmp_path, "samplers": {"c": "vlm"}}, None, {})


def test_tool_parsers_are_named_per_base_model(tmp_path: Path) -> None:
    assert set(TOOL_PARSERS) == {*FAMILIES, "plain"}
    config = read_config({"home": tmp_path}, toml(tmp_path, "tool_parsers = { a = 'hermes' }"), {})
    assert config.tool_parsers == {"a": "hermes"}
    with pytest.raises(ConfigError, match="tool parser of a is 'json'; expected one of hermes,"):
        read_config({"home": tmp_path, "tool_parsers": {"a": "json"}}, None, {})


def test_file_types_are_strict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"port is '80' in .*some.toml; expected a whole number"):
        read_from_file(toml(tmp_path, "port = '80'"))


def test_invalid_or_missing_file_error_names_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"some.toml is not valid TOML: .*line 1"):
        read_from_file(toml(tmp_path, "port = = 1"))
    with pytest.raises(ConfigError, match=r"absent.toml cannot be read: No such file"):
        read_config({}, tmp_path / "absent.toml", HOME)


def test_api_key_is_never_printed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_from_file(toml(tmp_path, "api_key = ['tml-secret']"))
    assert "secret" not in str(refused.value)
    assert "tml-secret" not in repr(read_config({"api_key": "tml-secret"}, None, HOME))


_TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20)
_SCALARS = st.one_of(
    st.integers(-(2**40), 2**40), st.booleans(), st.floats(allow_nan=False), _TEXTS
)


def in_toml(value: Any) -> str:
    """A value as a TOML file has it."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@given(st.dictionaries(st.sampled_from(FIELDS), _SCALARS, max_size=4))
def test_any_file_content_is_parsed_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("toml") / "any.toml"
    lines = [f"{name} = {in_toml(value)}\n" for name, value in content.items()]
    path.write_text("".join(lines), "utf-8")
    try:
        config = read_config({}, path, HOME)
    except ConfigError as refused:
        assert "\n" not in refused.message
    else:
        for name, value in content.items():
            assert getattr(config, name) == value


@given(st.text(max_size=30).filter(lambda text: "\0" not in text))
def test_any_variable_is_parsed_or_rejected(text: str) -> None:
    for name in FIELDS:
        try:
            settings = read_from_variables({variable_name(name): text})
        except ConfigError:
            continue
        assert set(settings) <= {name}


# --- from process to process --------------------------------------------------------------------


def test_settings_round_trip_to_child_process() -> None:
    config = read_config(
        {
            "home": Path("/a/b"),
            "models": ("a=/x", "b"),
            "api_key": "tml-k",
            "client_flags": {"x": [1, {"y": None}]},
            "gap_seconds": 1.25,
        },
        None,
        HOME,
    )
    assert decode_config(encode_config(config)) == config


# --- checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 65536}, "port is 65536; expected 0 to 65535"),
        ({"engine": "magic"}, "engine is 'magic'; expected one of"),
        ({"api_processes": 0}, "api_processes is 0; expected at least 1"),
        ({"store_connections": 2}, "store_connections is 2; expected 3 or more"),
        ({"api_key": "secret"}, "api_key must begin with 'tml-'"),
        ({"log_level": "loud"}, "log_level is 'loud'; expected debug"),
        ({"idle_stop_seconds": -1.0}, "idle_stop_seconds is -1.0; expected a number from 0"),
        ({"stop_seconds": float("inf")}, "stop_seconds is inf; expected more than 0"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0; expected more than 0"),
        ({"head_seconds": 601.0}, "head_seconds is 601.0; expected at most 600"),
        ({"body_seconds": 0.0}, "body_seconds is 0.0; expected more than 0"),
        ({"max_connections": -1}, "max_connections is -1; expected a number from 0"),
        ({"api_hang_seconds": 1.0}, "api_hang_seconds is 1.0; expected 5 or more, or 0"),
        ({"gap_seconds": float("nan")}, "gap_seconds is nan"),
        ({"long_poll_seconds": 60.0}, "long_poll_seconds is 60.0; expected 1 to 40"),
    ],
)
def test_out_of_range_setting_is_rejected(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(flags, None, HOME)
