"""The profile of `login` and `logout`, and edits of config.toml that preserve comments."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.client.config import normalise_url
from tinkex.client.profiles import ProfilesFile, lock_for_update, read_profiles
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.settings import HOSTED_BASE_URL, Environment, read_environment
from tinkex.system.atomic import write_file_atomic

#: Name of the profile that is created if none is given.
DEFAULT_PROFILE_NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTarget:
    """An existing profile, or one to be created."""

    name: str
    base_url: str
    """The server of the profile."""
    settings: Mapping[str, object] = field(repr=False)
    """The current settings of the profile."""
    file: ProfilesFile
    home: Home
    environment: Environment = field(repr=False)


def find_profile_target(context: Context) -> ProfileTarget:
    """Return the given profile, the default one, or a new one."""
    environment = read_environment()
    home = Home(environment.home)
    file = read_profiles(home.profiles_file)
    name = context.profile or environment.profile or file.default or DEFAULT_PROFILE_NAME
    settings = file.profiles.get(name, {})
    in_profile, in_variable = settings.get("base_url"), environment.base_url
    # A profile given with --profile precedes the variable, as in every other command.
    base_url = (in_profile or in_variable) if context.profile else (in_variable or in_profile)
    return ProfileTarget(
        name=name,
        base_url=normalise_url(context.base_url or base_url or HOSTED_BASE_URL),
        settings=settings,
        file=file,
        home=home,
        environment=environment,
    )


def check_profile_server(context: Context, target: ProfileTarget) -> None:
    """Raise CliError if the default profile would be changed to another server."""
    own = target.settings.get("base_url")
    if context.profile or not isinstance(own, str) or normalise_url(own) == target.base_url:
        return
    raise CliError(
        f"profile {target.name!r} is for {own}, not for {target.base_url}",
        "Pass --profile NAME: a new name adds a profile, the same name replaces it.",
    )


_FILE_HEADER = "# Servers and keys of tinkex; `tinkex config show` shows which are used.\n"


def store_key(home: Home, name: str, settings: Mapping[str, str], *, is_default: bool) -> None:
    """Write settings to a profile, and optionally make it the default."""
    home.create()
    with _edit_profiles(home.profiles_file) as (text, write):
        if is_default:
            text = set_toml_values(text or _FILE_HEADER, (), {"default_profile": name})
        write(set_toml_values(text or _FILE_HEADER, ("profiles", name), settings))


def drop_key(home: Home, name: str) -> None:
    """Delete the key of a profile and unset it as default; its server stays."""
    is_default = read_profiles(home.profiles_file).default == name
    with _edit_profiles(home.profiles_file) as (text, write):
        if is_default:
            text = set_toml_values(text, (), {"default_profile": None})
        write(set_toml_values(text, ("profiles", name), {"api_key": None}))


@contextlib.contextmanager
def _edit_profiles(path: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Lock the profiles file; yield its text and a function that replaces it."""
    # Write to the target of a symlink, so that the link stays.
    target = path.resolve()
    try:
        with lock_for_update(target):
            read_profiles(target)
            text = target.read_bytes().decode() if target.exists() else ""
            yield text, lambda new: write_file_atomic(target, new.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    except ConfigError as error:
        error.hint = error.hint or f"Edit {path} by hand."
        raise


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def set_toml_values(text: str, table: tuple[str, ...], values: Mapping[str, str | None]) -> str:
    """Set values in a TOML table, () for the top level; None deletes a value.

    Raises ConfigError if the text cannot be edited line by line.
    """
    before = tomllib.loads(text)
    lines = _TomlLines(text)
    for key, value in values.items():
        lines.set_value(table, key, value)
    changed = lines.text()
    try:
        after = tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        after = {}
    if after != _apply_values(before, table, values):
        name = ".".join(table) or "the top level"
        raise ConfigError(f"{name} is formatted in a way that cannot be edited automatically")
    return changed


def _apply_values(
    before: Mapping[str, object], table: tuple[str, ...], values: Mapping[str, str | None]
) -> dict[str, object]:
    document = copy.deepcopy(dict(before))
    target = document
    for part in table:
        inner = target.setdefault(part, {})
        assert isinstance(inner, dict)  # read_profiles() has checked the tables
        target = inner
    for key, value in values.items():
        target.pop(key, None)
        if value is not None:
            target[key] = value
    return document


class _TomlLines:
    """A TOML document as lines that can be edited one by one."""

    def __init__(self, text: str) -> None:
        self._end = "\r\n" if "\r\n" in text else "\n"
        # Not splitlines(), which also splits at characters that TOML allows in strings.
        self._lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        if not text:
            self._lines = []

    def text(self) -> str:
        return self._end.join([*self._lines, ""]) if self._lines else ""

    def set_value(self, table: tuple[str, ...], key: str, value: str | None) -> None:
        """Set or delete a value."""
        begin, end = self._table_bounds(table)
        if begin is None:
            if value is None:
                return
            self._lines += ["", _format_header(table)] if self._lines else [_format_header(table)]
            begin = end = len(self._lines)
        index = next((i for i in range(begin, end) if _parse_key(self._lines[i]) == key), None)
        if index is not None:
            comment = _trailing_comment(self._lines[index])
            self._lines[index : index + 1] = (
                [] if value is None else [_format_pair(key, value) + comment]
            )
        elif value is not None:
            self._insert_row(begin, end, _format_pair(key, value), is_top=not table)

    def _insert_row(self, begin: int, end: int, row: str, *, is_top: bool) -> None:
        rows = self._lines[begin:end]
        keys = [i for i, line in enumerate(rows) if _parse_key(line) is not None]
        if keys or not is_top:
            self._lines.insert(begin + (keys[-1] + 1 if keys else 0), row)
            return
        # Insert before the first table and the comment above it.
        blank = max((i for i, line in enumerate(rows) if not line.strip()), default=len(rows) - 1)
        index = begin + blank + 1 if end < len(self._lines) else end
        self._lines[index:index] = [row, ""] if end < len(self._lines) else [row]

    def _table_bounds(self, table: tuple[str, ...]) -> tuple[int | None, int]:
        """Return the line range of a table without its header; the start is None if absent."""
        headers = [i for i, line in enumerate(self._lines) if line.lstrip().startswith("[")]
        if not table:
            return 0, headers[0] if headers else len(self._lines)
        for i, index in enumerate(headers):
            if _is_header(self._lines[index], table):
                after = headers[i + 1] if i + 1 < len(headers) else len(self._lines)
                return index + 1, after
        return None, 0


def _format_header(table: tuple[str, ...]) -> str:
    return f"[{'.'.join(_format_key(part) for part in table)}]"


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quote(key)


def _format_pair(key: str, value: str) -> str:
    return f"{_format_key(key)} = {_quote(value)}"


def _quote(text: str) -> str:
    # A JSON string is a valid TOML string except for the DEL character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _is_header(line: str, table: tuple[str, ...]) -> bool:
    parsed: object = _parse_line(line)
    for part in table:
        if not isinstance(parsed, dict) or list(parsed) != [part]:
            return False
        parsed = parsed[part]
    return parsed == {}


def _parse_key(line: str) -> str | None:
    parsed = _parse_line(line)
    return next(iter(parsed)) if parsed and not line.lstrip().startswith("[") else None


def _trailing_comment(line: str) -> str:
    for i, letter in enumerate(line):
        if letter == "#" and _parse_line(line[:i]) is not None:
            return "  " + line[i:]
    return ""


def _parse_line(line: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
