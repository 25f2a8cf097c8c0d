"""Encryption of checkpoints, and invalid recipients and identities."""

from __future__ import annotations

import base64
import struct
import sys
from pathlib import Path

import pyrage
import pytest

from tinkex.checkpoint.encryption import (
    check_recipients,
    decrypt_directory,
    encrypt_directory,
    read_identities,
)
from tinkex.checkpoint.manifest import check_manifest, write_manifest
from tinkex.errors import CheckpointError, ConfigError, InvalidInput


def ssh_public_key() -> str:
    """Return a valid public key without a known secret key."""
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
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_each_recipient_can_decrypt_every_file(directory: Path) -> None:
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


def test_ssh_key_is_a_recipient(directory: Path) -> None:
    encrypt_directory(directory, [ssh_public_key()])
    assert files(directory)["weights.age"].startswith(b"age-encryption.org/v1\n-> ssh-ed25519 ")


@pytest.mark.parametrize(
    ("recipients", "reason"),
    [
        ([], "no age recipients"),
        ([""], "age recipient '' is neither"),
        (["age1nonsense"], "age recipient 'age1nonsense' is neither"),
        (["ssh-ed25519 AAAA"], "age recipient 'ssh-ed25519 AAAA' is neither"),
    ],
)
def test_invalid_recipient_is_named_and_files_are_unchanged(
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


def test_secret_key_is_refused_without_being_shown() -> None:
    secret = str(pyrage.x25519.Identity.generate())
    with pytest.raises(InvalidInput, match="a secret one was given") as caught:
        check_recipients([secret])
    assert secret[20:40] not in str(caught.value)


def test_unwritable_file_is_named(directory: Path) -> None:
    (directory / "weights.age").mkdir()
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(CheckpointError, match="'weights' cannot be encrypted"):
        encrypt_directory(directory, [recipient])


def test_missing_library_raises_config_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    with pytest.raises(ConfigError, match=r"need the package pyrage: .* install .*server"):
        encrypt_directory(directory, ["age1"])


# --- decryption --------------------------------------------------------------------------------


def test_decryption_restores_the_files(directory: Path) -> None:
    one = pyrage.x25519.Identity.generate()
    write_manifest(directory)
    clear = files(directory)
    encrypt_directory(directory, [str(one.to_public())])
    assert {name.rpartition(".")[2] for name in files(directory)} == {"age"}
    decrypt_directory(directory, [one])
    assert files(directory) == clear


def test_file_not_in_decrypted_manifest_is_refused(directory: Path) -> None:
    one = pyrage.x25519.Identity.generate()
    write_manifest(directory)
    (directory / "weights").write_bytes(b"other numbers")
    encrypt_directory(directory, [str(one.to_public())])
    with pytest.raises(CheckpointError, match=r"'weights' of .* has 13 bytes, expected 70000"):
        decrypt_directory(directory, [one])


def test_unencrypted_file_among_encrypted_ones_is_refused(directory: Path) -> None:
    one = pyrage.x25519.Identity.generate()
    write_manifest(directory)
    encrypt_directory(directory, [str(one.to_public())])
    (directory / ".server-manifest.json").write_text('{"files": {}}')
    with pytest.raises(CheckpointError, match=r"'\.server-manifest\.json' is not encrypted"):
        decrypt_directory(directory, [one])


def test_manifest_of_older_server_is_replaced(directory: Path) -> None:
    one = pyrage.x25519.Identity.generate()
    clear = files(directory)
    encrypt_directory(directory, [str(one.to_public())])
    write_manifest(directory)
    decrypt_directory(directory, [one])
    assert check_manifest(directory).files.keys() == clear.keys()


def test_wrong_identity_or_damage_names_the_file(directory: Path) -> None:
    one, stranger = (pyrage.x25519.Identity.generate() for _ in range(2))
    write_manifest(directory)
    encrypt_directory(directory, [str(one.to_public())])
    with pytest.raises(
        CheckpointError, match=r"'manifest\.json\.age' cannot be decrypted"
    ) as caught:
        decrypt_directory(directory, [stranger])
    assert "identity of one of the recipients" in (caught.value.hint or "")
    content = bytearray((directory / "weights.age").read_bytes())
    content[-1] ^= 1
    (directory / "weights.age").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'weights\.age' cannot be decrypted"):
        decrypt_directory(directory, [one])


def test_identity_file_of_age_keygen_is_read(tmp_path: Path) -> None:
    one, two = (pyrage.x25519.Identity.generate() for _ in range(2))
    path = tmp_path / "key.txt"
    path.write_text(f"# created: today\n# public key: {one.to_public()}\n{one}\n\n{two}\n")
    identities = [str(identity) for identity in read_identities(path)]
    assert identities == [str(one), str(two)]


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n", b"age1public", b"\xff\x00", b"-----BEGIN x"]
)
def test_file_without_identity_is_refused_without_showing_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "key.txt"
    path.write_bytes(content)
    with pytest.raises(
        InvalidInput, match=r"key\.txt' is neither an age identity file nor"
    ) as caught:
        read_identities(path)
    assert "age-keygen" in (caught.value.hint or "")
    with pytest.raises(InvalidInput, match="No such file"):
        read_identities(tmp_path / "gone")
