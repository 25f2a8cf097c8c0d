"""By what files and folders are known again: digests of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.pipeline.rows import digest_file
from tinkex.pipeline.run.records import DataFile


def describe_data(path: Path, known: Sequence[DataFile] = ()) -> DataFile:
    """A data file with its digest; one that is known and untouched is not read again."""
    try:
        stat = path.stat()
        for file in known:
            same = (file.path, file.size, file.modified_ns)
            if same == (str(path), stat.st_size, stat.st_mtime_ns):
                return file
        digest = digest_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return DataFile(path=str(path), size=stat.st_size, modified_ns=stat.st_mtime_ns, sha256=digest)


def combined(files: Sequence[DataFile]) -> str:
    """One digest for several files, in their order."""
    if len(files) == 1:
        return files[0].sha256
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def digest_weights(path: Path) -> str:
    """The digest of a .pth file, or of a folder's weights and configuration."""
    if path.is_file():
        return digest_file(path)
    files = sorted([*path.glob("*.safetensors"), *path.glob("*.bin"), path / "config.json"])
    found = [file for file in files if file.is_file()]
    if len(found) < 2:
        raise ConfigError(
            f"{path} is no model: it has no config.json beside weights",
            hint="Name a Hugging Face folder or a .pth file.",
        )
    digests = "".join(f"{file.name} {digest_file(file)}\n" for file in found)
    return hashlib.sha256(digests.encode()).hexdigest()
