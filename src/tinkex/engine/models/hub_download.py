"""Finds models of the Hugging Face Hub in the local cache, or downloads them into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

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

from tinkex.display import format_bytes
from tinkex.engine.models import hub_download_process
from tinkex.engine.models.model_folder import ModelFolder, read_model_config, read_model_folder
from tinkex.engine.models.weight_files import UnusableModel, error_reason
from tinkex.logs import get_logger

LOG = get_logger(__name__)
#: The timeout for listing a model's files.
LIST_TIMEOUT_SECONDS = 8.0
#: The interval of progress reports in the log, and to a progress bar.
LOG_INTERVAL_SECONDS, PROGRESS_INTERVAL_SECONDS = 2.0, 0.2
_SMALL_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja")
#: What huggingface_hub raises without a network. It depends on the version, which uses requests or
#: httpx, so it is taken from the base class of the library's own error.
HUB_NETWORK_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
assert issubclass(HUB_NETWORK_ERROR, Exception)


class Hub:
    """Access to the Hub and its cache; defaults to the endpoint and cache of huggingface_hub."""

    def __init__(
        self,
        endpoint: str | None = None,
        cache: Path | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`on_progress` receives downloaded and total bytes; without it they are logged."""
        self._endpoint = endpoint
        self._cache = Path(HF_HUB_CACHE) if cache is None else cache
        self._on_progress = on_progress

    def find(self, model_id: str) -> ModelFolder:
        """Return a model's folder; downloads what the cache lacks."""
        path = self._cached_path(model_id)
        if path is None:
            return self._download(model_id, _not_cached_message(model_id))
        read_model_config(path)
        try:
            return read_model_folder(path)
        except UnusableModel as error:
            return self._download(model_id, error.message)

    def find_cached(self, model_id: str) -> ModelFolder:
        """Return the folder of a cached model; raises UnusableModel if it is not in the cache."""
        path = self._cached_path(model_id)
        if path is None:
            raise UnusableModel(_not_cached_message(model_id))
        return read_model_folder(path)

    def _cached_path(self, model_id: str) -> Path | None:
        """The path of a model in the cache, which may be incomplete."""
        try:
            found = try_to_load_from_cache(model_id, "config.json", cache_dir=self._cache)
        except HFValidationError as error:
            raise UnusableModel(
                f"{model_id!r} is neither a local folder nor a model id of the Hugging Face Hub"
            ) from error
        return Path(found).parent if isinstance(found, str) else None

    def _download(self, model_id: str, reason: str) -> ModelFolder:
        """Download what the cache lacks: first the small files, to check the model."""
        files = self._list_files(model_id, reason)
        small = [name for name in files if name.endswith(_SMALL_FILE_SUFFIXES)]
        weights = [name for name in files if name.endswith(".safetensors")]
        weights = weights or [name for name in files if name.endswith(".bin")]
        LOG.info("%s: downloading it", reason)
        disable_progress_bars()
        num_bytes = sum(files[name] for name in (*small, *weights))
        try:
            self._check_disk_space(model_id, num_bytes)
            read_model_config(self._fetch(model_id, small))
            return read_model_folder(self._fetch_weights(model_id, [*small, *weights], num_bytes))
        except (HUB_NETWORK_ERROR, OSError) as error:
            raise UnusableModel(
                f"model {model_id!r} could not be downloaded: {error_reason(error)}",
                hint="Try again; complete files are not downloaded again.",
            ) from error

    def _check_disk_space(self, model_id: str, num_bytes: int) -> None:
        """Raise if the cache's disk does not have enough free space."""
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if num_bytes > free:
            raise UnusableModel(
                f"model {model_id!r} needs {format_bytes(num_bytes)}, but only "
                f"{format_bytes(free)} are free in {self._cache}",
                hint="Free space, or set HF_HUB_CACHE to a directory on another disk.",
            )

    def _list_files(self, model_id: str, reason: str) -> dict[str, int]:
        """The files of a model and their sizes; fails quickly without a network."""
        api = HfApi(endpoint=self._endpoint)
        try:
            info = api.model_info(model_id, files_metadata=True, timeout=LIST_TIMEOUT_SECONDS)
        except GatedRepoError as error:
            raise UnusableModel(
                f"model {model_id!r} is gated, and you do not have access",
                hint="Request access on its page, then log in with `hf auth login`.",
            ) from error
        except RepositoryNotFoundError as error:
            raise UnusableModel(
                f"{reason}, and the Hub does not have it",
                hint="Correct the name, or log in with `hf auth login` if it is private.",
            ) from error
        except OfflineModeIsEnabled as error:
            raise UnusableModel(f"{reason}, and HF_HUB_OFFLINE forbids downloads") from error
        except (HUB_NETWORK_ERROR, OSError) as error:
            raise UnusableModel(
                f"{reason}, and the Hub cannot be reached: {error_reason(error)}",
                hint="Give a folder that has the model, or go online once.",
            ) from error
        # Subfolders hold other formats of the same weights.
        return {
            file.rfilename: file.size or 0
            for file in info.siblings or ()
            if "/" not in file.rfilename
        }

    def _fetch(self, model_id: str, names: Sequence[str]) -> Path:
        return Path(snapshot_download(**self._request(model_id, names)))

    def _fetch_weights(self, model_id: str, names: Sequence[str], num_bytes: int) -> Path:
        """Download large files in a child process, so that Ctrl-C ends it; report progress."""
        blobs = self._cache / f"models--{model_id.replace('/', '--')}" / "blobs"

        def report() -> None:
            num_downloaded = min(num_bytes, _downloaded_bytes(blobs))
            if self._on_progress is not None:
                self._on_progress(num_downloaded, num_bytes)
                return
            sizes = f"{format_bytes(num_downloaded)} of {format_bytes(num_bytes)}"
            LOG.info("model %r: %s", model_id, sizes)

        interval = LOG_INTERVAL_SECONDS if self._on_progress is None else PROGRESS_INTERVAL_SECONDS
        return hub_download_process.download_in_process(
            self._request(model_id, names), report, interval
        )

    def _request(self, model_id: str, names: Sequence[str]) -> hub_download_process.DownloadRequest:
        return {
            "repo_id": model_id,
            "endpoint": self._endpoint,
            "cache_dir": str(self._cache),
            # Names are used as patterns; file names of models do not contain wildcards.
            "allow_patterns": list(names),
        }


def _not_cached_message(model_id: str) -> str:
    return f"{model_id!r} is not a local folder and not in the Hugging Face cache"


def _downloaded_bytes(blobs: Path) -> int:
    """Bytes on disk, including incomplete files."""
    num_bytes = 0
    for path in blobs.glob("*"):
        try:
            num_bytes += path.stat().st_blocks * 512
        except OSError:  # the file was renamed meanwhile
            continue
    return num_bytes
