"""URLs that open one file for whoever has them, until they expire."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

from tinkex.errors import PermissionDeniedError
from tinkex.wire.endpoints import PREFIX

#: Below this, a signature takes the place of a key.
FILES_PREFIX = f"{PREFIX}/files"


class FileArea(StrEnum):
    """What kind of thing a URL opens."""

    FILE = "checkpoints"  #: one file of a checkpoint
    ARCHIVE = "archives"  #: all files of a checkpoint in one tar
    TRACE = "traces"  #: what a session did when


@dataclass(frozen=True, slots=True)
class FileRef:
    """What a URL opens; `name` is a file's path within its checkpoint, else a fixed name."""

    area: FileArea
    owner_id: str
    name: str


def sign_url(secret: bytes, base_url: str, file_ref: FileRef, expires: int) -> str:
    """A URL that works until that second."""
    path = f"{FILES_PREFIX}/{file_ref.area}/{quote(file_ref.owner_id, safe=':')}/{quote(file_ref.name)}"
    return (
        f"{base_url}{path}?expires={expires}&signature={_sign_file_ref(secret, file_ref, expires)}"
    )


def verify_signed_url(
    secret: bytes, file_ref: FileRef, expires: str, signature: str, now: float
) -> None:
    """Refuse a URL that was not made here, or not for this place, or that is too old."""
    is_time = expires.isascii() and expires.isdigit() and len(expires) <= 12
    expected = _sign_file_ref(secret, file_ref, int(expires) if is_time else 0)
    if not is_time or not hmac.compare_digest(expected.encode(), signature.encode()):
        raise PermissionDeniedError("the link is not valid; ask for a new one")
    if int(expires) <= now:
        raise PermissionDeniedError("the link has expired; ask for a new one")


def _sign_file_ref(secret: bytes, file_ref: FileRef, expires: int) -> str:
    # No part contains a newline: ids and names never do, so no two places read the same.
    text = "\n".join(("download", file_ref.area, file_ref.owner_id, file_ref.name, str(expires)))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
