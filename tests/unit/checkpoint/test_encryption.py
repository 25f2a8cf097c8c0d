"""Encrypted directories: who can read them, and what is refused."""

from __future__ import annotations

import base64
import struct
import sys
from pathlib import Path

import pyrage
import pytest

from tinkex.checkpoint.encryption import check_recipients, encrypt_directory
from tinkex.errors import CheckpointError, ConfigError, InvalidInput


def ssh_public_key() -> str:
    """A valid key whose secret half nobody has."""
    kind, point = b"ssh-ed25519", b"\x58" + b"\x66" * 31
    blob = b"".join(struct.pack(">I", len(part)) + part for part in (kind, point))
    return f"ssh-ed25519 {base64.b64encode(blob).decode()} nobody@nowhere"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(b"numbers" * 10_000)
    (tmp_path / "sub" / "config.json").write_bytes(b"{}")
    return tmp_path


def files(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def test_every_file_is_readable_by_each_recipient_alone(directory: Path) -> None:
    one, two, stranger = (pyrage.x25519.Identity.generate() for _ in range(3))
    clear = files(directory)
    encrypt_directory(directory, [str(one.to_public()), f" {two.to_public()}\n"])
    locked = files(directory)
    assert locked.keys() == {"weights.age", "sub/config.json.age"}
    for name, content in clear.items():
        assert pyrage.decrypt(locked[f"{name}.age"], [one]) == content
        assert pyrage.decrypt(locked[f"{name}.age"], [two]) == content
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(locked["weights.age"], [stranger])


def test_an_ssh_key_is_a_recipient(directory: Path) -> None:
    encrypt_directory(directory, [ssh_public_key()])
    assert files(directory)["weights.age"].startswith(b"age-encryption.org/v1\n-> ssh-ed25519 ")


@pytest.mark.parametrize(
    ("recipients", "reason"),
    [
        ([], "there is no age recipient"),
        ([""], "age recipient '' is neither"),
        (["age1nonsense"], "age recipient 'age1nonsense' is neither"),
        (["ssh-ed25519 AAAA"], "age recipient 'ssh-ed25519 AAAA' is neither"),
    ],
)
def test_a_wrong_recipient_is_named_and_nothing_is_touched(
    directory: Path, recipients: list[str], reason: str
) -> None:
    before = files(directory)
    good = str(pyrage.x25519.Identity.generate().to_public())
    given = [good, *recipients] if recipients else []
    with pytest.raises(InvalidInput, match=reason):
        encrypt_directory(directory, given)
    with pytest.raises(InvalidInput, match=reason):
        check_recipients(given)
    assert files(directory) == before


def test_a_secret_key_is_refused_without_being_repeated() -> None:
    secret = str(pyrage.x25519.Identity.generate())
    with pytest.raises(InvalidInput, match="a secret one was given") as caught:
        check_recipients([secret])
    assert secret[20:40] not in str(caught.value)


def test_a_file_that_cannot_be_written_is_named(directory: Path) -> None:
    (directory / "weights.age").mkdir()
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(CheckpointError, match="'weights' cannot be encrypted"):
        encrypt_directory(directory, [recipient])


def test_without_the_library_one_sentence_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    with pytest.raises(ConfigError, match=r"need the package pyrage: .* install .*server"):
        encrypt_directory(directory, ["age1"])
