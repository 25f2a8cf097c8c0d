"""Where the files of checkpoints and snapshots are: directories in the home, or places in blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkex.checkpoint.blob_cache import BlobCache, Pin
from tinkex.checkpoint.manifest import VerifiedCheckpoints, check_manifest
from tinkex.checkpoint.places import new_place
from tinkex.checkpoint.transfers import BlobTransfers
from tinkex.errors import CheckpointError, ConfigError
from tinkex.home import Home
from tinkex.ids import new_id
from tinkex.logs import get_logger
from tinkex.system.atomic import new_directory, remove_directory

LOG = get_logger(__name__)


class NewFiles:
    """Files that were written here and may still have to be uploaded."""

    def __init__(
        self, place: str, directory: Path, cache: BlobCache | None = None, pin: Pin | None = None
    ) -> None:
        self.place = place
        """The place in blobs. In the home: the name of a snapshot, empty for a checkpoint."""
        self.directory = directory
        """Where to write the files; afterwards, where they are."""
        self._cache = cache
        self._pin = pin
        self._uploaded: set[str] = set()

    def upload(self) -> None:
        """Upload the files, if they belong in blobs; after BlobsUnavailable it may be repeated."""
        if self._cache is not None:
            self._cache.store.upload(self.place, self.directory, self._uploaded)
            self.close()

    def close(self) -> None:
        """Allow the eviction of the local copy."""
        if self._pin is not None:
            self._pin.close()


class FileStorage:
    """The files of a server. New ones go to blobs if there are any; old ones stay where they are.

    Methods that open files may download them first, and raise BlobsUnavailable.
    """

    def __init__(
        self,
        home: Home,
        cache: BlobCache | None = None,
        *,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """With `wake`, methods that open files raise BlobPending instead of waiting.

        It is called on another thread when a download has ended.
        """
        self.home = home
        self._cache = cache
        self._transfers = BlobTransfers(wake) if wake is not None and cache is not None else None
        self._verified = VerifiedCheckpoints()

    @property
    def has_blobs(self) -> bool:
        """Whether new files go to object storage."""
        return self._cache is not None

    @property
    def cache(self) -> BlobCache:
        """The local copies of blobs."""
        if self._cache is None:
            raise ConfigError(
                "the files are in object storage, and the setting blobs is empty; pass --blobs"
            )
        return self._cache

    # --- checkpoints -------------------------------------------------------------------------
    @contextmanager
    def new_checkpoint(self, checkpoint_id: str) -> Iterator[NewFiles]:
        """Yield the directory of a new checkpoint, which is complete when the block succeeds.

        In the home it is named by its id, so that a retry after a crash replaces it.
        """
        final = self.home.checkpoint_directory(checkpoint_id)
        with self._new_files("checkpoints", checkpoint_id, final, "") as files:
            yield files
        self._verified.mark_verified(files.directory)

    @contextmanager
    def open_checkpoint(self, checkpoint_id: str, place: str, name: object) -> Iterator[Path]:
        """Yield the verified directory of a checkpoint; raises CheckpointError about `name`."""
        pin = self.pin_checkpoint(checkpoint_id, place, name)
        try:
            yield pin.directory
        finally:
            pin.close()

    def pin_checkpoint(self, checkpoint_id: str, place: str, name: object) -> Pin:
        """Return the verified directory of a checkpoint; the caller closes the pin."""
        if not place:
            directory = self.checkpoint_path(checkpoint_id, place)
            self._verified.verify(directory, name)
            return Pin(directory)
        try:
            return self._pin(place, lambda directory: self._verified.verify(directory, name))
        except CheckpointError as error:
            if error.message.startswith("checkpoint "):
                raise
            raise CheckpointError(
                f"checkpoint {name} is damaged on the server: {error.message}"
            ) from error.__cause__

    def checkpoint_path(self, checkpoint_id: str, place: str) -> Path:
        """Return where the files of a checkpoint are while they are pinned."""
        if place:
            return self.cache.local_path(place)
        return self.home.checkpoint_directory(checkpoint_id)

    # --- snapshots ---------------------------------------------------------------------------
    @contextmanager
    def new_snapshot(self, run_id: str, applied: int) -> Iterator[NewFiles]:
        """Yield a directory for a model's state after `applied` changes."""
        name = f"{run_id.replace(':', '_')}-{applied}"
        unique = f"{name}-{new_id()[:8]}"
        with self._new_files("snapshots", name, self.home.snapshots / unique, unique) as files:
            yield files

    @contextmanager
    def open_snapshot(self, snapshot: str) -> Iterator[Path]:
        """Yield the verified directory of a snapshot."""
        if not is_place(snapshot):
            directory = self.home.snapshots / snapshot
            check_manifest(directory)
            yield directory
            return
        pin = self._pin(snapshot, check_manifest)
        try:
            yield pin.directory
        finally:
            pin.close()

    def remove_snapshot(self, snapshot: str) -> None:
        """Remove the files of a snapshot."""
        if is_place(snapshot):
            self.remove_place(snapshot)
        else:
            remove_directory(self.home.snapshots / snapshot)

    # --- blobs -------------------------------------------------------------------------------
    @property
    def is_available(self) -> bool:
        """Whether new files can be stored; False during an outage of the object store."""
        return self._cache is None or self._cache.store.is_available

    def read_payload(self, place: str, *, wait: bool = False) -> bytes:
        """Return a large payload."""
        store = self.cache.store
        if wait or self._transfers is None:
            return store.read_payload(place)
        return self._transfers.take(place, lambda: store.read_payload(place))

    def prefetch_payload(self, place: str, num_bytes: int) -> None:
        """Start to read a payload that is needed soon."""
        store = self.cache.store
        if self._transfers is not None and store.is_available:
            self._transfers.prefetch(place, lambda: store.read_payload(place), num_bytes)

    def close(self) -> None:
        """Stop downloads in the background."""
        if self._transfers is not None:
            self._transfers.close()

    def remove_place(self, place: str) -> None:
        """Remove a place from the object store, and its local copy."""
        self.cache.store.remove(place)
        self.cache.drop(place)

    @contextmanager
    def _new_files(
        self, area: str, name: str, final: Path, name_in_home: str
    ) -> Iterator[NewFiles]:
        if self._cache is None:
            with new_directory(final) as directory:
                files = NewFiles(name_in_home, directory)
                yield files
            files.directory = final
            return
        place = new_place(area, name)
        with self._cache.new_copy(place) as pin:
            files = NewFiles(place, pin.directory, self._cache, pin)
            yield files
        files.directory = pin.directory

    def _pin(self, place: str, verify: Callable[[Path], object]) -> Pin:
        """Pin a local copy; one that was damaged on this disk is downloaded again."""
        cache = self.cache
        if self._transfers is not None and not cache.local_path(place).is_dir():
            self._transfers.take(place, lambda: cache.pin(place).close())
        try:
            return _verified(cache.pin(place), verify)
        except CheckpointError as error:
            LOG.warning("reading %s again: %s", place, error)
            cache.drop(place)
            return _verified(cache.pin(place), verify)


def _verified(pin: Pin, verify: Callable[[Path], object]) -> Pin:
    try:
        verify(pin.directory)
    except BaseException:
        pin.close()
        raise
    return pin


def is_place(snapshot: str) -> bool:
    """Return whether a snapshot is in blobs; names of directories in the home have no slash."""
    return "/" in snapshot
