"""The list of served base models, reloaded when the home's models file changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tinkex.engine.models.sources import add_built_in_models, merge_sources, read_model_list
from tinkex.errors import ConfigError
from tinkex.logs import get_logger

LOG = get_logger(__name__)


class BaseModelList:
    """The base models of a server: from its flags, from its home and built into the package."""

    def __init__(self, file: Path, flags: Sequence[str]) -> None:
        self._file = file
        self._flags = flags
        # Taken before the list is read, so the next check notices a change in between.
        self._stamp = _file_stamp(file)

    def read_sources(self) -> dict[str, str]:
        """Map each base model's name to its location."""
        return add_built_in_models(merge_sources(read_model_list(self._file), self._flags))

    def refresh_if_changed(self, replace: Callable[[Mapping[str, str]], None]) -> bool:
        """Call `replace` with the base models if the file has changed; return whether it has."""
        stamp = _file_stamp(self._file)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            replace(self.read_sources())
        except ConfigError as error:
            LOG.warning("ignoring the changed list of base models: %s", error.message)
            return False
        return True


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    """Inode, modification time and size of a file, to detect changes; None if it is missing."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
