"""Encryption of checkpoints in the age format.

Recipients are age keys (`age1...`) and SSH public keys. The library is imported when needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tinkex.checkpoint.manifest import MANIFEST_NAME, check_manifest, list_files, write_manifest
from tinkex.errors import CheckpointError, ConfigError, InvalidInput
from tinkex.installation import install_command

AGE_SUFFIX = ".age"
#: Maximum size of an identity file.
MAX_IDENTITY_BYTES = 2**20
_SSH_KEY_TYPES = ("ssh-ed25519 ", "ssh-rsa ")


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise InvalidInput for the first invalid recipient."""
    _parse_recipients(_import_pyrage(), recipients)


def encrypt_directory(directory: Path, recipients: Sequence[str]) -> None:
    """Replace each file in a directory by an encrypted one with the suffix `.age`.

    A failure leaves some files unencrypted, so use this before the directory is published.
    """
    library = _import_pyrage()
    keys = _parse_recipients(library, recipients)
    for path in list(list_files(directory)):
        target = path.with_name(path.name + AGE_SUFFIX)
        try:
            library.encrypt_file(str(path), str(target), keys)
        except (library.EncryptError, OSError) as error:
            raise CheckpointError(f"{path.name!r} cannot be encrypted: {error}") from error
        path.unlink()


def read_identities(path: Path) -> list[object]:
    """Read the secret keys of an age identity file or an SSH private key."""
    library = _import_pyrage()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_IDENTITY_BYTES)
        if content.lstrip().startswith(b"-----BEGIN"):
            return [library.ssh.Identity.from_buffer(content)]
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        identities = [library.x25519.Identity.from_str(key) for key in keys]
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except (library.IdentityError, UnicodeDecodeError):
        # Without the library's message, which could contain the secret.
        identities = []
    if not identities:
        raise InvalidInput(
            f"{str(path)!r} is neither an age identity file nor an SSH private key",
            hint="Pass the file that `age-keygen -o` wrote.",
        )
    return identities


def decrypt_directory(directory: Path, identities: Sequence[object]) -> None:
    """Replace each `.age` file in a directory by its decrypted content and check the manifest.

    A failure leaves some files encrypted, so use a directory that is discarded on failure.
    """
    library = _import_pyrage()
    files = list(list_files(directory))
    encrypted = [path for path in files if path.suffix == AGE_SUFFIX]
    has_manifest = directory / f"{MANIFEST_NAME}{AGE_SUFFIX}" in encrypted
    # Older servers have one unencrypted file: the manifest of the encrypted files.
    allowed = set() if has_manifest else {directory / MANIFEST_NAME}
    for path in set(files) - set(encrypted) - allowed:
        name = path.relative_to(directory).as_posix()
        raise CheckpointError(f"{name!r} is not encrypted, and the other files are")
    for path in encrypted:
        target = path.with_suffix("")
        try:
            library.decrypt_file(str(path), str(target), list(identities))
        except (library.DecryptError, OSError) as error:
            target.unlink(missing_ok=True)
            name = path.relative_to(directory).as_posix()
            raise CheckpointError(
                f"{name!r} cannot be decrypted: {error}",
                hint="Use an identity of one of the recipients that it was encrypted to.",
            ) from error
        path.unlink()
    if has_manifest:
        check_manifest(directory)
    else:
        write_manifest(directory)


def _import_pyrage() -> ModuleType:
    try:
        return importlib.import_module("pyrage")
    except ImportError:
        raise ConfigError(
            f"encrypted checkpoints need the package pyrage: {install_command('server')}"
        ) from None


def _parse_recipients(library: ModuleType, recipients: Sequence[str]) -> list[object]:
    if not recipients:
        raise InvalidInput("no age recipients to encrypt to")
    return [_parse_recipient(library, text.strip()) for text in recipients]


def _parse_recipient(library: ModuleType, text: str) -> object:
    # A secret key given by mistake must not appear in the error.
    if text.upper().startswith(("AGE-SECRET-KEY", "-----BEGIN")):
        raise InvalidInput("an age recipient is a public key, and a secret one was given")
    module = library.ssh if text.startswith(_SSH_KEY_TYPES) else library.x25519
    try:
        return module.Recipient.from_str(text)
    except library.RecipientError as error:
        raise InvalidInput(
            f"age recipient {text!r:.120} is neither an age key nor an SSH public key: {error}"
        ) from None
