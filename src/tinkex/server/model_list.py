"""The home's list of base models, followed while the server runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tinkex.engine.models.sources import add_built_in_models, merge_sources, read_model_list
from tinkex.errors import ConfigError
from tinkex.logs import get_logger

LOG = get_logger(__name__)


class BaseModelList:
    """The base models of a server: those of its flags, of its home and of the package."""

    def __init__(self, file: Path, flags: Sequence[str]) -> None:
        self._file = file
        self._flags = flags
        # Before the list is read: a change in between is noticed by the next look.
        self._stamp = _file_stamp(file)

    def read_sources(self) -> dict[str, str]:
        """Every base model with its place."""
        return add_built_in_models(merge_sources(read_model_list(self._file), self._flags))

    def refresh_if_changed(self, replace: Callable[[Mapping[str, str]], None]) -> bool:
        """Call `replace` with the base models if the list has changed; returns whether it has."""
        stamp = _file_stamp(self._file)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            replace(self.read_sources())
        except ConfigError as error:
            LOG.warning("the changed list of base models is not used: %s", error.message)
            return False
        return True


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    """What differs between two versions of a file; None if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
