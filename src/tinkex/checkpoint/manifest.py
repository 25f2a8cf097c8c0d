"""Manifest of a directory: the size and SHA-256 of each file, to detect damage.

`VerifiedCheckpoints` compares a stored checkpoint with its manifest once per process.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from tinkex.errors import CheckpointError
from tinkex.system.atomic import write_file_atomic
from tinkex.types.base import preload_type

MANIFEST_NAME = "manifest.json"
#: The server's manifest of encrypted files. It is not downloadable, because every downloadable file
#: of an encrypted checkpoint must be encrypted.
SERVER_MANIFEST_NAME = ".server-manifest.json"
#: Maximum size of a manifest: enough for 100,000 files with long names.
MAX_MANIFEST_BYTES = 32 * 2**20
#: Maximum number of remembered checkpoints.
MAX_VERIFIED = 4096

#: Name, size, time of the last change in nanoseconds, and inode of each file.
FileIdentities = tuple[tuple[str, int, int, int], ...]


class ManifestFile(msgspec.Struct, frozen=True):
    """The expected size and digest of a file."""

    size: int
    sha256: str
    """In hexadecimal."""


class Manifest(msgspec.Struct, frozen=True):
    """All files in a directory by relative path, except the manifest itself."""

    files: dict[str, ManifestFile]

    @property
    def total_bytes(self) -> int:
        """The total size of the files."""
        return sum(entry.size for entry in self.files.values())


def write_manifest(directory: Path, name: str = MANIFEST_NAME) -> Manifest:
    """Write the manifest of a directory and return it."""
    manifest = Manifest(
        {file: _hash_file(directory / file) for file in _file_names(directory, name)}
    )
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    # The same permissions as the other files, which the umask determines.
    write_file_atomic(directory / name, text + b"\n", mode=0o666)
    return manifest


def manifest_of_upload(directory: Path) -> Manifest:
    """Return the manifest of all files of a directory, its own manifests included."""
    files = dict(read_manifest(directory).files)
    for name in (MANIFEST_NAME, SERVER_MANIFEST_NAME):
        if (directory / name).is_file():
            files[name] = _hash_file(directory / name)
    return Manifest(files)


def manifest_name(directory: Path) -> str:
    """Return the name of the manifest that verifies a directory."""
    is_encrypted = (directory / SERVER_MANIFEST_NAME).is_file()
    return SERVER_MANIFEST_NAME if is_encrypted else MANIFEST_NAME


def downloadable_names(directory: Path) -> list[str]:
    """Return the downloadable files of a directory: all except the server's manifest."""
    own = [] if manifest_name(directory) == SERVER_MANIFEST_NAME else [MANIFEST_NAME]
    return [*read_manifest(directory).files, *own]


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest; raises CheckpointError if it is missing or invalid."""
    return parse_manifest(directory, read_manifest_bytes(directory))


def read_manifest_bytes(directory: Path) -> bytes:
    """Read the content of the manifest."""
    path = directory / manifest_name(directory)
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MAX_MANIFEST_BYTES else b""
    except FileNotFoundError:
        raise CheckpointError(f"{directory.name!r} has no {MANIFEST_NAME}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{MANIFEST_NAME} of {directory.name!r}: {reason}") from error
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{MANIFEST_NAME} of {directory.name!r} has {size:,} bytes, "
            f"at most {MAX_MANIFEST_BYTES:,} are read"
        )
    return content


def parse_manifest(directory: Path, content: bytes) -> Manifest:
    """Parse a manifest; refuse names that point outside the directory."""
    try:
        manifest = msgspec.json.decode(content, type=preload_type(Manifest))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} of {directory.name!r}: {error}") from None
    for name in manifest.files:
        if not _is_safe_name(name):
            raise CheckpointError(f"{MANIFEST_NAME} of {directory.name!r} lists {name!r}")
    return manifest


def check_manifest(directory: Path) -> Manifest:
    """Hash every file; raises CheckpointError for the first that differs from the manifest.

    Files that the manifest does not list are ignored.
    """
    manifest = read_manifest(directory)
    for name, expected in manifest.files.items():
        _check_file(directory, name, expected)
    return manifest


def _check_file(directory: Path, name: str, expected: ManifestFile) -> None:
    try:
        size = (directory / name).stat().st_size
        # The size is cheap to check and detects most damage.
        actual = _hash_file(directory / name) if size == expected.size else None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{name!r} of {directory.name!r}: {reason}") from error
    if actual is None:
        raise CheckpointError(
            f"{name!r} of {directory.name!r} has {size} bytes, expected {expected.size}"
        )
    if actual != expected:
        raise CheckpointError(
            f"{name!r} of {directory.name!r} is damaged: its sha256 is {actual.sha256}, "
            f"expected {expected.sha256}"
        )


def list_files(directory: Path) -> Iterator[Path]:
    """Yield all files in a directory, sorted by path; symbolic links are refused."""
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            name = path.relative_to(directory).as_posix()
            raise CheckpointError(f"{name!r} of {directory.name!r} is a link, not a file")
        if path.is_file():
            yield path


def _file_names(directory: Path, manifest: str) -> list[str]:
    names = sorted(path.relative_to(directory).as_posix() for path in list_files(directory))
    return [name for name in names if name != manifest]


def _hash_file(path: Path) -> ManifestFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return ManifestFile(file.tell(), digest.hexdigest())


def _is_safe_name(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path) == name and name != "." and ".." not in path.parts and not path.is_absolute()


class VerifiedCheckpoints:
    """Remembers verified directories; changed files are verified again."""

    def __init__(self, max_verified: int = MAX_VERIFIED) -> None:
        self._max_verified = max_verified
        self._verified: OrderedDict[Path, FileIdentities] = OrderedDict()
        self._lock = threading.Lock()

    def verify(self, directory: Path, name: object) -> None:
        """Raise CheckpointError about `name` unless the files match the manifest.

        Hashes all files the first time, so it may block for a while.
        """
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint {name} has no files: it was deleted or has expired")
        try:
            manifest = read_manifest(directory)
            identity = _directory_identity(directory, manifest)
            with self._lock:
                is_known = self._verified.get(directory) == identity
            if not is_known:
                check_manifest(directory)
                self._store(directory, identity)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {name} is damaged on the server: {error.message}"
            ) from error.__cause__

    def mark_verified(self, directory: Path) -> None:
        """Mark a directory as verified that this process has just written."""
        self._store(directory, _directory_identity(directory, read_manifest(directory)))

    def _store(self, directory: Path, identity: FileIdentities) -> None:
        with self._lock:
            self._verified[directory] = identity
            self._verified.move_to_end(directory)
            if len(self._verified) > self._max_verified:
                self._verified.popitem(last=False)


def _directory_identity(directory: Path, manifest: Manifest) -> FileIdentities:
    return tuple(_file_identities(directory, (manifest_name(directory), *sorted(manifest.files))))


def _file_identities(
    directory: Path, names: tuple[str, ...]
) -> Iterator[tuple[str, int, int, int]]:
    for name in names:
        try:
            status = (directory / name).stat()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{name!r}: {reason}") from error
        yield name, status.st_size, status.st_mtime_ns, status.st_ino
