"""Shell completion of ids from the configured server, with a short deadline and no errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from tinkex.cli.context import Context, get_context

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tinkex.client.rest import RestClient

#: The shell blocks while it waits for completions.
DEADLINE_SECONDS = 1.5
MAX_ITEMS = 50
#: A value and its description, for shells that show descriptions.
IdCandidate = tuple[str, str]
IdSearch = Callable[["RestClient", str], Sequence[IdCandidate]]


class IdType(click.ParamType[str]):
    """A run, session or checkpoint id with shell completion; the value is not changed."""

    def __init__(self, name: str, search: IdSearch) -> None:
        self.name = name
        self._search = search

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the value unchanged; commands resolve it on the server."""
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Return the server's ids with this prefix; empty if it does not answer in time."""
        from click.shell_completion import CompletionItem

        candidates = within_deadline(
            lambda: _search_server(get_context(ctx), self._search, incomplete)
        )
        return [CompletionItem(value, help=about) for value, about in candidates[:MAX_ITEMS]]


def within_deadline(
    search: Callable[[], Sequence[IdCandidate]], seconds: float = DEADLINE_SECONDS
) -> Sequence[IdCandidate]:
    """Run a search in a thread; return an empty result if it fails or takes too long."""
    answers: list[Sequence[IdCandidate]] = []

    def work() -> None:
        try:
            answers.append(search())
        except BaseException:  # noqa: BLE001 - a shell prompt must not show an error
            return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else ()


def _search_server(context: Context, search: IdSearch, incomplete: str) -> Sequence[IdCandidate]:
    from tinkex.cli.client import find_access, rest_client

    access = find_access(context)
    if access.base_url is None or not access.has_credential:
        # Completion must not start a server.
        return ()
    known = context._replace(base_url=access.base_url, api_key=access.key or context.api_key)
    with rest_client(
        known, max_retries=0, outage_seconds=0.1, timeout_seconds=DEADLINE_SECONDS
    ) as client:
        return search(client, incomplete)


def search_runs(client: RestClient, incomplete: str) -> list[IdCandidate]:
    """Return runs whose id starts with `incomplete`."""
    future = (
        client.find_training_runs(incomplete, MAX_ITEMS)
        if incomplete
        else client.list_training_runs(MAX_ITEMS)
    )
    return [
        (run.training_run_id, run.name or run.base_model)
        for run in future.result().training_runs
        if run.training_run_id.startswith(incomplete)
    ]


def search_sessions(client: RestClient, incomplete: str) -> list[IdCandidate]:
    """Return sessions whose id starts with `incomplete`."""
    session_ids = client.list_sessions(1000).result().sessions
    return [(session_id, "") for session_id in session_ids if session_id.startswith(incomplete)]


def search_checkpoints(client: RestClient, incomplete: str) -> list[IdCandidate]:
    """Return checkpoints whose path starts with `incomplete`."""
    page = client.list_user_checkpoints(1000).result()
    return [
        (saved.tinker_path, saved.checkpoint_type)
        for saved in page.checkpoints
        if saved.tinker_path.startswith(incomplete)
    ]


#: Help texts of arguments of these types.
RUN_SUMMARY = "The run: its id, a prefix of it, its name, or latest."
SESSION_SUMMARY = "The session: its id, a prefix of it, or latest."
RUN = IdType("run", search_runs)
SESSION = IdType("session", search_sessions)
CHECKPOINT = IdType("checkpoint", search_checkpoints)
