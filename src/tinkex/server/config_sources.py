"""Read server settings from flags, environment variables and a TOML file, in that precedence."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.server.config import ServerConfig
from tinkex.server.pools import PoolConfig
from tinkex.settings import expand_path, read_environment, read_variables

FIELDS = tuple(row.name for row in fields(ServerConfig))
#: TINKEX_API_KEY belongs to the client and must not become a server's key by accident. TINKEX_LOG
#: sets the log level of both.
_SPECIAL_VARIABLES = {"api_key": "TINKEX_SERVER_API_KEY", "log_level": "TINKEX_LOG"}


def variable_name(field: str) -> str:
    """The environment variable of a field."""
    return _SPECIAL_VARIABLES.get(field, f"TINKEX_{field.upper()}")


def read_config(
    flags: Mapping[str, Any],
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Merge all sources; a flag that is None counts as not given.

    Without a file, the home's `server.toml` is read if it exists.
    """
    from_flags = {name: value for name, value in flags.items() if value is not None}
    from_variables = read_from_variables(environ)
    default_home = read_environment(environ).home
    home = expand_path(from_flags.get("home") or from_variables.get("home") or default_home)
    from_file = read_from_file(file) if file is not None else _read_from_home(home)
    return ServerConfig(**{**from_file, **from_variables, **from_flags, "home": home})


def read_from_variables(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings from environment variables, converted to their fields' types."""
    variables = read_variables(map(variable_name, FIELDS), environ)
    by_field = {name: variables.get(variable_name(name)) for name in FIELDS}
    # Kubernetes sets TINKEX_PORT=tcp://... in containers when a service is named "tinkex".
    if (by_field["port"] or "").startswith("tcp://"):
        by_field["port"] = None
    return {
        name: _parse_variable(name, text, variable_name(name))
        for name, text in by_field.items()
        if text is not None
    }


def read_from_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML file; an unknown key raises an error with a suggestion."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{path} cannot be read: {reason}",
            hint="Pass another file, or make this one readable for the user of the server.",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name in content:
        if name not in FIELDS or name == "home":
            raise ConfigError(f"{path}: unknown setting {name!r}; {_suggest_field(name)}")
    return {name: _convert(name, value, str(path)) for name, value in content.items()}


def encode_config(config: ServerConfig) -> bytes:
    """Encode settings for a child process; the result contains the API key."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(data: bytes) -> ServerConfig:
    """Decode settings that the supervisor encoded."""
    return msgspec.json.decode(data, type=ServerConfig, dec_hook=_decode_path)


def _read_from_home(home: Path) -> dict[str, Any]:
    path = Home(home).config_file
    return read_from_file(path) if path.exists() else {}


def _parse_variable(name: str, text: str, variable: str) -> object:
    kind = _FIELD_TYPES[name]
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind in _JSON_TYPES:
        try:
            return _convert(name, msgspec.json.decode(text), variable)
        except msgspec.DecodeError:
            raise ConfigError(f"{variable} is {text!r}; expected {_JSON_TYPES[kind]}") from None
    return _convert(name, text, variable, strict=False)


def _convert(name: str, value: object, origin: str, *, strict: bool = True) -> object:
    try:
        return msgspec.convert(value, _FIELD_TYPES[name], strict=strict, dec_hook=_decode_path)
    except (msgspec.ValidationError, ValueError) as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{origin}: {cause.message}") from None
        if name == "pools":
            raise ConfigError(f"pools in {origin}: {error}") from None
        # Never print an API key.
        shown = "invalid" if name == "api_key" else f"{value!r}"
        raise ConfigError(f"{name} is {shown} in {origin}; expected {_EXPECTED[name]}") from None


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return expand_path(value)
    raise ValueError(value)


def _suggest_field(name: str) -> str:
    known = [field for field in FIELDS if field != "home"]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known settings: {', '.join(known)}"


def _describe_type(kind: object) -> str:
    words: dict[object, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
    }
    if kind in words:
        return words[kind]
    if kind == tuple[PoolConfig, ...]:
        return "a list of tables with name, models, ranks, resources, min and max"
    return "a list of strings" if kind == tuple[str, ...] else "a table"


_FIELD_TYPES: dict[str, object] = get_type_hints(ServerConfig)
#: Types whose environment variables are JSON.
_JSON_TYPES: dict[object, str] = {
    Mapping[str, Any]: "a JSON object",
    tuple[PoolConfig, ...]: "a JSON list of objects",
}
_EXPECTED = {
    name: "a path" if name == "home" else _describe_type(_FIELD_TYPES[name]) for name in FIELDS
}
