"""Files that only those may read whom the owner named, in the age format.

Recipients are age keys (`age1...`) and SSH public keys. The library is loaded when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.checkpoint.manifest import list_files
from tinkex.errors import CheckpointError, ConfigError, InvalidInput
from tinkex.installation import install_command

SUFFIX = ".age"
_SSH_KINDS = ("ssh-ed25519 ", "ssh-rsa ")


def check_recipients(recipients: Sequence[str]) -> None:
    """Refuse what nothing can be encrypted to, by the first that is wrong."""
    _parse_all(_library(), recipients)


def encrypt_directory(directory: Path, recipients: Sequence[str]) -> None:
    """Put an encrypted file in the place of each file below, its name ending in `.age`.

    A failure leaves some files in the clear: encrypt where nobody looks yet.
    """
    library = _library()
    keys = _parse_all(library, recipients)
    for path in list(list_files(directory)):
        target = path.with_name(path.name + SUFFIX)
        try:
            library.encrypt_file(str(path), str(target), keys)
        except (library.EncryptError, OSError) as error:
            raise CheckpointError(f"{path.name!r} cannot be encrypted: {error}") from error
        path.unlink()


def _library() -> Any:
    try:
        return importlib.import_module("pyrage")
    except ImportError:
        raise ConfigError(
            f"encrypted checkpoints need the package pyrage: {install_command('server')}"
        ) from None


def _parse_all(library: Any, recipients: Sequence[str]) -> list[Any]:
    if not recipients:
        raise InvalidInput("there is no age recipient to encrypt to")
    return [_parse(library, text.strip()) for text in recipients]


def _parse(library: Any, text: str) -> Any:
    # A secret that was pasted by mistake must not end up in a message.
    if text.upper().startswith(("AGE-SECRET-KEY", "-----BEGIN")):
        raise InvalidInput("an age recipient is a public key, and a secret one was given")
    room = library.ssh if text.startswith(_SSH_KINDS) else library.x25519
    try:
        return room.Recipient.from_str(text)
    except library.RecipientError as error:
        raise InvalidInput(
            f"age recipient {text!r:.120} is neither an age key nor an SSH public key: {error}"
        ) from None
