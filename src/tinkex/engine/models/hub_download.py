"""Finds models of the Hugging Face Hub in the local cache, or downloads them into it.

Weights are downloaded in a child process, so that Ctrl-C ends the download immediately:
huggingface_hub downloads in threads that cannot be interrupted, and a process that starts them
exits only when the files are complete.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

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
#: The suffix of files that huggingface_hub is still writing.
INCOMPLETE_SUFFIX = ".incomplete"
_EXIT_TIMEOUT_SECONDS = 5.0


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
        return download_in_process(self._request(model_id, names), report, interval)

    def _request(self, model_id: str, names: Sequence[str]) -> DownloadRequest:
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


# --- the child process ---------------------------------------------------------------------------


class DownloadRequest(TypedDict):
    """Arguments of snapshot_download."""

    repo_id: str
    endpoint: str | None
    cache_dir: str
    allow_patterns: list[str]


def download_in_process(
    request: DownloadRequest, on_wait: Callable[[], None], interval_seconds: float
) -> Path:
    """Call snapshot_download with these arguments; raises OSError if it fails."""
    # Its own process group, so that Ctrl-C in a terminal interrupts only this process.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            _wait_for_exit(child, on_wait, interval_seconds)
            answer = child.stdout.read()
        finally:
            # Closing stdin makes a running child remove its incomplete files and exit.
            child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_EXIT_TIMEOUT_SECONDS)
            child.kill()
    if not answer:
        raise OSError(f"the download process exited with code {child.returncode}")
    result = json.loads(answer)
    if "path" not in result:
        raise OSError(result["reason"])
    return Path(result["path"])


def _wait_for_exit(
    child: subprocess.Popen[bytes], on_wait: Callable[[], None], seconds: float
) -> None:
    while True:
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            on_wait()


def main() -> None:
    """Read the arguments from stdin, download, and write the path or the error to stdout."""
    request = json.loads(sys.stdin.readline())
    incomplete: set[str] = set()
    sys.addaudithook(lambda event, args: _record_incomplete_file(incomplete, event, args))
    threading.Thread(target=_exit_with_parent, args=(incomplete,), daemon=True).start()
    disable_progress_bars()
    try:
        answer = {"path": str(snapshot_download(**request))}
    except Exception as error:  # noqa: BLE001 - the parent process reports any error
        answer = {"reason": error_reason(error)}
    sys.stdout.write(json.dumps(answer))


def _record_incomplete_file(incomplete: set[str], event: str, args: tuple[object, ...]) -> None:
    """Record the incomplete files that this process opens; their names are unpredictable."""
    if event == "open" and str(args[0]).endswith(INCOMPLETE_SUFFIX):
        incomplete.add(str(args[0]))


def _exit_with_parent(incomplete: set[str]) -> None:
    """Exit when the parent closes the pipe to stdin, or ends."""
    sys.stdin.read()
    for path in tuple(incomplete):
        # huggingface_hub neither resumes nor removes such files.
        with suppress(OSError):
            Path(path).unlink()
    os._exit(1)


if __name__ == "__main__":
    main()
