"""Shell completion of ids: asks the server that is in use, gives up soon, and prints no errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, get_context

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tinkex.client.rest import RestClient

#: A shell blocks while it waits for completions.
DEADLINE_SECONDS = 1.5
MAX_ITEMS = 50
#: A value and what it is, as shells that show descriptions print it.
IdCandidate = tuple[str, str]
IdSearch = Callable[["RestClient", str], Sequence[IdCandidate]]


class IdType(click.ParamType[str]):
    """An id or a path that a shell can complete; the value itself is kept as it is typed."""

    def __init__(self, name: str, search: IdSearch) -> None:
        self.name = name
        self._search = search

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value as it is; commands resolve it with the server at hand."""
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """What the server knows that begins so; nothing if it does not answer in time."""
        from click.shell_completion import CompletionItem

        found = within_deadline(lambda: _search_server(get_context(ctx), self._search, incomplete))
        return [CompletionItem(value, help=about) for value, about in found[:MAX_ITEMS]]


def within_deadline(
    search: Callable[[], Sequence[IdCandidate]], seconds: float = DEADLINE_SECONDS
) -> Sequence[IdCandidate]:
    """The answer, or nothing if it fails or takes too long."""
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
    from tinkex.cli.access import find_access
    from tinkex.cli.client import rest_client

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
    """Runs whose id begins so."""
    asked = (
        client.find_training_runs(incomplete, MAX_ITEMS)
        if incomplete
        else client.list_training_runs(MAX_ITEMS)
    )
    return [
        (run.training_run_id, run.name or run.base_model)
        for run in asked.result().training_runs
        if run.training_run_id.startswith(incomplete)
    ]


def search_sessions(client: RestClient, incomplete: str) -> list[IdCandidate]:
    """Sessions whose id begins so."""
    found = client.list_sessions(1000).result().sessions
    return [(session_id, "") for session_id in found if session_id.startswith(incomplete)]


def search_checkpoints(client: RestClient, incomplete: str) -> list[IdCandidate]:
    """Checkpoints whose path begins so."""
    page = client.list_user_checkpoints(1000).result()
    return [
        (saved.tinker_path, saved.checkpoint_type)
        for saved in page.checkpoints
        if saved.tinker_path.startswith(incomplete)
    ]


#: What the help says about arguments of these types.
RUN_SUMMARY = "The run: its id, the beginning of it, its name, or latest."
SESSION_SUMMARY = "The session: its id, the beginning of it, or latest."
RUN = IdType("run", search_runs)
SESSION = IdType("session", search_sessions)
CHECKPOINT = IdType("checkpoint", search_checkpoints)
