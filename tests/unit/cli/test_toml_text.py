"""Editing TOML text: values change, everything else is preserved."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.auth.profile_file import set_toml_values
from tinkex.errors import ConfigError

FILE = """\
# My servers.
default_profile = "home"  # where I mostly am

# The one at work.
[profiles.work]
base_url = "https://work.example"   # do not lose # this
api_key = "tml-old"

[profiles."at home"]
base_url = 'http://127.0.0.1:1'

[other]
list = [
  "a",  # first
]
"""


def test_set_value_preserves_comments() -> None:
    changed = set_toml_values(FILE, ("profiles", "work"), {"api_key": "tml-new"})
    assert changed == FILE.replace("tml-old", "tml-new")
    changed = set_toml_values(FILE, ("profiles", "work"), {"base_url": "https://new.example"})
    assert 'base_url = "https://new.example"  # do not lose # this\n' in changed
    assert changed.count("#") == FILE.count("#")


def test_a_value_is_added_to_its_table() -> None:
    changed = set_toml_values(FILE, ("profiles", "at home"), {"api_key": "k"})
    assert "base_url = 'http://127.0.0.1:1'\napi_key = \"k\"\n\n[other]" in changed


def test_a_table_is_added_at_the_end() -> None:
    changed = set_toml_values(FILE, ("profiles", "new one"), {"api_key": "k"})
    assert changed == FILE + '\n[profiles."new one"]\napi_key = "k"\n'


def test_top_level_value_is_inserted_before_first_table() -> None:
    assert 'default_profile = "work"  # where' in set_toml_values(
        FILE, (), {"default_profile": "work"}
    )
    bare = "# Servers.\n\n# One.\n[profiles.a]\n"
    changed = set_toml_values(bare, (), {"default_profile": "a"})
    assert changed == '# Servers.\n\ndefault_profile = "a"\n\n# One.\n[profiles.a]\n'
    assert set_toml_values("# Top.\n", (), {"x": "1"}) == '# Top.\nx = "1"\n'


def test_none_deletes_a_value() -> None:
    changed = set_toml_values(FILE, ("profiles", "work"), {"api_key": None})
    assert changed == FILE.replace('api_key = "tml-old"\n', "")


def test_line_endings_are_preserved() -> None:
    changed = set_toml_values(FILE.replace("\n", "\r\n"), ("profiles", "work"), {"api_key": "x"})
    assert changed.count("\r\n") == changed.count("\n") == FILE.count("\n")


@pytest.mark.parametrize(
    "text",
    [
        'profiles = {work = {api_key = "a"}}\n',
        'profiles.work.api_key = "a"\n',
        '[profiles]\nwork.api_key = "a"\n',
        '[profiles]\nwork = {api_key = "a"}\n',
        'text = """\n[profiles.work]\n"""\n[profiles.work]\napi_key = "a"\n',
        '[profiles.work]\napi_key = """\na"""\n',
    ],
)
def test_unsupported_layout_is_rejected_or_edited_correctly(text: str) -> None:
    try:
        changed = set_toml_values(text, ("profiles", "work"), {"api_key": "b"})
    except ConfigError as error:
        assert "cannot be edited automatically" in error.message
    else:
        assert tomllib.loads(changed)["profiles"]["work"] == {"api_key": "b"}


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(name=words, key=words, value=words)
def test_any_name_and_value_round_trips(name: str, key: str, value: str) -> None:
    changed = set_toml_values(FILE, ("profiles", name), {key: value})
    assert tomllib.loads(changed)["profiles"][name][key] == value
    comments = [line for line in FILE.splitlines() if line.startswith("#")]
    assert all(line in changed for line in comments)
