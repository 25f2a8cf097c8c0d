"""Where the hosted console shows a thing."""

from __future__ import annotations

from urllib.parse import quote

from tinkex.settings import HOSTED_CONSOLE_URL


def checkpoint_console_url(training_run_id: str, checkpoint_id: str) -> str:
    """The page of a checkpoint."""
    run, checkpoint = quote(training_run_id, safe=""), quote(checkpoint_id, safe="")
    return f"{HOSTED_CONSOLE_URL}/checkpoints/{run}/{checkpoint}"


def playground_url(tinker_path: str) -> str:
    """The page to talk to a checkpoint."""
    return (
        f"{HOSTED_CONSOLE_URL}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"
    )
