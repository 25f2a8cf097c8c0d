"""Models of the Hugging Face hub: found in the cache of this machine, else downloaded into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from tinkex.engine.models import hub_download_process
from tinkex.engine.models.model_folder import ModelFolder, read_model_config, read_model_folder
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.logs import get_logger
from tinkex.units import format_bytes

LOG = get_logger(__name__)
#: How long the hub may take to say whether it has a model.
LIST_TIMEOUT_SECONDS = 8.0
#: How often the log, or a progress bar, says how much has arrived.
LOG_INTERVAL_SECONDS, PROGRESS_INTERVAL_SECONDS = 2.0, 0.2
_SMALL_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja")
#: What the hub's library raises when no answer comes; its name depends on the version.
_NETWORK: type[Exception] = HfHubHTTPError.__mro__[1]
assert issubclass(_NETWORK, Exception)


class Hub:
    """A hub and the cache of what came from it; the defaults are those of the library."""

    def __init__(
        self,
        endpoint: str | None = None,
        cache: Path | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`on_progress` gets the bytes that have arrived and all there are, instead of the log."""
        self._endpoint = endpoint
        self._cache = Path(HF_HUB_CACHE) if cache is None else cache
        self._on_progress = on_progress

    def find(self, model_id: str) -> ModelFolder:
        """The folder of a model; only a whole one in the cache saves the way to the hub."""
        place = self._cached_path(model_id)
        if place is None:
            return self._download(model_id, _not_cached_message(model_id))
        read_model_config(place)
        try:
            return read_model_folder(place)
        except UnusableModel as error:
            return self._download(model_id, error.message)

    def find_cached(self, model_id: str) -> ModelFolder:
        """The folder of a model that is in the cache."""
        place = self._cached_path(model_id)
        if place is None:
            raise UnusableModel(_not_cached_message(model_id))
        return read_model_folder(place)

    def _cached_path(self, model_id: str) -> Path | None:
        """Where the cache has a model, or a part of it."""
        try:
            found = try_to_load_from_cache(model_id, "config.json", cache_dir=self._cache)
        except HFValidationError as error:
            raise UnusableModel(
                f"{model_id!r} is neither a folder here nor the id of a model on the hub"
            ) from error
        return Path(found).parent if isinstance(found, str) else None

    def _download(self, model_id: str, reason: str) -> ModelFolder:
        """Fetch what the cache lacks: first what says whether the model is of use at all."""
        files = self._list_files(model_id, reason)
        small = [name for name in files if name.endswith(_SMALL_FILE_SUFFIXES)]
        weights = [name for name in files if name.endswith(".safetensors")]
        weights = weights or [name for name in files if name.endswith(".bin")]
        LOG.info("%s: it is downloaded", reason)
        disable_progress_bars()
        num_bytes = sum(files[name] for name in (*small, *weights))
        try:
            self._check_disk_space(model_id, num_bytes)
            read_model_config(self._fetch(model_id, small))
            return read_model_folder(self._fetch_weights(model_id, [*small, *weights], num_bytes))
        except (_NETWORK, OSError) as error:
            raise UnusableModel(
                f"model {model_id!r} could not be downloaded: {_reason(error)}",
                hint="Try again: complete files are kept.",
            ) from error

    def _check_disk_space(self, model_id: str, num_bytes: int) -> None:
        """Refuse a model that is larger than the free space of the cache's disk."""
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if num_bytes > free:
            raise UnusableModel(
                f"model {model_id!r} has {format_bytes(num_bytes)}, and {format_bytes(free)} are "
                f"free in {self._cache}",
                hint="Free space, or set HF_HUB_CACHE to a directory on another disk.",
            )

    def _list_files(self, model_id: str, reason: str) -> dict[str, int]:
        """The files of a model and their sizes; whoever has no network hears of it at once."""
        api = HfApi(endpoint=self._endpoint)
        try:
            info = api.model_info(model_id, files_metadata=True, timeout=LIST_TIMEOUT_SECONDS)
        except GatedRepoError as error:
            raise UnusableModel(
                f"model {model_id!r} is not open to everybody, and not to you yet",
                hint="Ask for access on its page, then log in with `hf auth login`.",
            ) from error
        except RepositoryNotFoundError as error:
            raise UnusableModel(
                f"{reason}, and the hub knows no such model",
                hint="Correct the name, or log in with `hf auth login` if it is private.",
            ) from error
        except OfflineModeIsEnabled as error:
            raise UnusableModel(f"{reason}, and HF_HUB_OFFLINE forbids to download it") from error
        except (_NETWORK, OSError) as error:
            raise UnusableModel(
                f"{reason}, and the hub cannot be reached: {_reason(error)}",
                hint="Name a folder that has the model, or go online once.",
            ) from error
        # Folders below hold other formats of the same weights.
        return {
            file.rfilename: file.size or 0
            for file in info.siblings or ()
            if "/" not in file.rfilename
        }

    def _fetch(self, model_id: str, names: Sequence[str]) -> Path:
        return Path(snapshot_download(**self._request(model_id, names)))

    def _fetch_weights(self, model_id: str, names: Sequence[str], num_bytes: int) -> Path:
        """Fetch large files so that Ctrl-C ends the download; report how much has arrived."""
        blobs = self._cache / f"models--{model_id.replace('/', '--')}" / "blobs"

        def report() -> None:
            num_arrived = min(num_bytes, _downloaded_bytes(blobs))
            if self._on_progress is not None:
                self._on_progress(num_arrived, num_bytes)
                return
            sizes = f"{format_bytes(num_arrived)} of {format_bytes(num_bytes)}"
            LOG.info("model %r: %s", model_id, sizes)

        interval = LOG_INTERVAL_SECONDS if self._on_progress is None else PROGRESS_INTERVAL_SECONDS
        return hub_download_process.download_in_process(
            self._request(model_id, names), report, interval
        )

    def _request(self, model_id: str, names: Sequence[str]) -> dict[str, Any]:
        return {
            "repo_id": model_id,
            "endpoint": self._endpoint,
            "cache_dir": str(self._cache),
            # A bracket in a name would be a pattern; no model has one.
            "allow_patterns": list(names),
        }


def _not_cached_message(model_id: str) -> str:
    return f"{model_id!r} is no folder here and not in the cache of the hub"


def _downloaded_bytes(blobs: Path) -> int:
    """Bytes on disk, also of files that are not complete yet."""
    num_bytes = 0
    for path in blobs.glob("*"):
        try:
            num_bytes += path.stat().st_blocks * 512
        except OSError:  # it was just renamed
            continue
    return num_bytes


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
