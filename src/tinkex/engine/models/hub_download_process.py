"""Downloads from the Hub in a child process, so that Ctrl-C ends the download immediately.

huggingface_hub downloads in threads that cannot be interrupted: a process that starts them exits
only when the files are complete.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from tinkex.engine.models.weight_files import error_reason

#: The suffix of files that huggingface_hub is still writing.
INCOMPLETE_SUFFIX = ".incomplete"
_EXIT_TIMEOUT_SECONDS = 5.0


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
