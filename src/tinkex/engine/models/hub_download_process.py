"""A download from the hub in a process of its own, which Ctrl-C ends at once.

The hub's library downloads on threads that cannot be interrupted: the process that starts them
ends only when the files are complete.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

#: How the names of files end that the hub's library is still writing.
INCOMPLETE_SUFFIX = ".incomplete"
_EXIT_TIMEOUT_SECONDS = 5.0


def download_in_process(
    request: Mapping[str, Any], on_wait: Callable[[], None], interval_seconds: float
) -> Path:
    """Call snapshot_download with these arguments; raises OSError with the reason if it fails."""
    # A process group of its own, so that Ctrl-C in a terminal reaches this process alone.
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
            # A child that is still at work removes its incomplete files and ends.
            child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_EXIT_TIMEOUT_SECONDS)
            child.kill()
    if not answer:
        raise OSError(f"the download process ended with exit code {child.returncode}")
    found = json.loads(answer)
    if "path" not in found:
        raise OSError(found["reason"])
    return Path(found["path"])


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
    """Read the arguments from stdin, download, and write the path or the reason to stdout."""
    request = json.loads(sys.stdin.readline())
    incomplete: set[str] = set()
    sys.addaudithook(lambda event, args: _record_incomplete_file(incomplete, event, args))
    threading.Thread(target=_exit_with_parent, args=(incomplete,), daemon=True).start()
    disable_progress_bars()
    try:
        answer = {"path": str(snapshot_download(**request))}
    except Exception as error:  # noqa: BLE001 - the parent process reports every reason
        answer = {"reason": " ".join(str(error).split()) or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


def _record_incomplete_file(incomplete: set[str], event: str, args: tuple[Any, ...]) -> None:
    """Note which incomplete files are this process's own; their names are not predictable."""
    if event == "open" and str(args[0]).endswith(INCOMPLETE_SUFFIX):
        incomplete.add(str(args[0]))


def _exit_with_parent(incomplete: set[str]) -> None:
    """End when the parent closes the pipe to stdin, or is gone."""
    sys.stdin.read()
    for path in tuple(incomplete):
        # The library does not resume such a file, and does not remove it later.
        with suppress(OSError):
            Path(path).unlink()
    os._exit(1)


if __name__ == "__main__":
    main()
