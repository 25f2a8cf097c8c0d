"""Ids as arguments of commands: shell completion, and short forms.

Completion asks the configured server, with a short deadline and no errors. A short form is a unique
prefix, `latest`, or a run's name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import click

from tinkex.cli.client import find_access, rest_client
from tinkex.cli.context import Context, get_context
from tinkex.cli.errors import CliError
from tinkex.ids import SCHEME, parse_tinker_path

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint, TrainingRun

#: The shell blocks while it waits for completions.
DEADLINE_SECONDS = 1.5
MAX_ITEMS = 50
#: A value and its description, for shells that show descriptions.
IdCandidate = tuple[str, str]
IdSearch = Callable[["RestClient", str], Sequence[IdCandidate]]
LATEST = "latest"
CheckpointSegment = Literal["weights", "sampler_weights"]
#: Full session and run ids; anything else may be a short form.
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RUN_ID = re.compile(_SESSION_ID.pattern + r":train:\d+")
#: Characters allowed in a short form.
_SHORT_FORM = re.compile(r"[\w.:@~+= -]{1,120}")
#: Limits for the search of a prefix on servers without search.
_MAX_PAGES, _RUNS_PER_PAGE, _SESSIONS_PER_PAGE = 10, 100, 1000
_MAX_CANDIDATES = 5


# --- shell completion ----------------------------------------------------------------------------


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


# --- short forms ---------------------------------------------------------------------------------


def resolve_run(client: RestClient, text: str) -> str:
    """Resolve a run id from an id, a prefix, a name, or `latest`.

    A prefix may omit the middle: 1a2b:train:0 is the first run of session 1a2b... A text without
    a match is returned unchanged, so that the server reports the error.
    """
    if _RUN_ID.fullmatch(text) or not _SHORT_FORM.fullmatch(text):
        return text
    if text == LATEST:
        return get_latest_run(client).training_run_id
    candidates = list(_iter_candidate_runs(client, text))
    by_id = [run for run in candidates if _has_prefix(run.training_run_id, text)]
    matches = by_id or [run for run in candidates if run.name == text]
    if len(matches) > 1:
        listed = [_describe_run(run) for run in matches]
        raise _ambiguous_id_error("run", text, listed)
    return matches[0].training_run_id if matches else text


def resolve_session(client: RestClient, text: str) -> str:
    """Resolve a session id from an id, a prefix, or `latest`."""
    if _SESSION_ID.fullmatch(text) or not _SHORT_FORM.fullmatch(text):
        return text
    if text == LATEST:
        newest = client.list_sessions(limit=1).result().sessions
        if not newest:
            raise CliError("No sessions exist yet", "A client opens one when it connects.")
        return newest[0]
    matches = [name for name in _iter_session_ids(client) if name.startswith(text)]
    if len(matches) > 1:
        raise _ambiguous_id_error("session", text, matches)
    return matches[0] if matches else text


def resolve_path(client: RestClient, text: str, segment: CheckpointSegment | None = None) -> str:
    """Resolve a checkpoint path whose run id is shortened, or `latest`, the newest checkpoint.

    `segment` is the kind of checkpoint that `latest` selects; None selects any.
    """
    if text == LATEST:
        return _get_latest_checkpoint(client, segment).tinker_path
    if not text.startswith(SCHEME):
        return text
    path = parse_tinker_path(text)
    return str(path._replace(run_id=resolve_run(client, path.run_id)))


def expand_path(
    context: Context,
    text: str,
    segment: CheckpointSegment | None = None,
    *,
    needs_worker: bool = False,
) -> str:
    """Like resolve_path(), but contacts the server only if the path is shortened.

    With `needs_worker`, a local server that is started for this also starts its worker.
    """
    if text != LATEST and not text.startswith(SCHEME):
        return text
    if text.startswith(SCHEME) and _RUN_ID.fullmatch(parse_tinker_path(text).run_id):
        return text
    with rest_client(context, needs_worker=needs_worker) as client:
        return resolve_path(client, text, segment)


def get_latest_run(client: RestClient) -> TrainingRun:
    """Return the newest run of this key."""
    newest = client.list_training_runs(limit=1).result().training_runs
    if not newest:
        raise CliError("No training runs exist yet", "`tinkex train sft DATA.jsonl` starts one.")
    return newest[0]


def _get_latest_checkpoint(client: RestClient, segment: CheckpointSegment | None) -> Checkpoint:
    """Return the newest checkpoint, of one kind if `segment` is given."""
    page = client.list_user_checkpoints(limit=_RUNS_PER_PAGE).result()
    for saved in page.checkpoints:
        if segment is None or saved.checkpoint_id.startswith(f"{segment}/"):
            return saved
    kind = {"weights": "training ", "sampler_weights": "sampler "}.get(segment or "", "")
    raise CliError(
        f"No {kind}checkpoints exist yet", "`tinkex checkpoint list` lists your checkpoints."
    )


def _has_prefix(run_id: str, text: str) -> bool:
    session, colon, rest = text.partition(":")
    if run_id.startswith(text):
        return True
    return bool(colon) and run_id.startswith(session) and run_id.endswith(f":{rest}")


def _iter_candidate_runs(client: RestClient, text: str) -> Iterator[TrainingRun]:
    """Yield runs that may match; a server without search returns its newest runs."""
    search = text.partition(":")[0] or text
    for number in range(_MAX_PAGES):
        offset = number * _RUNS_PER_PAGE
        page = client.find_training_runs(search, _RUNS_PER_PAGE, offset).result()
        yield from page.training_runs
        if (number + 1) * _RUNS_PER_PAGE >= page.cursor.total_count or not page.training_runs:
            return


def _iter_session_ids(client: RestClient) -> Iterator[str]:
    for number in range(_MAX_PAGES):
        offset = number * _SESSIONS_PER_PAGE
        page = client.list_sessions(_SESSIONS_PER_PAGE, offset).result().sessions
        yield from page
        if len(page) < _SESSIONS_PER_PAGE:
            return


def _describe_run(run: TrainingRun) -> str:
    return f"{run.training_run_id} ({run.name})" if run.name else run.training_run_id


def _ambiguous_id_error(what: str, text: str, matches: Sequence[str]) -> CliError:
    shown = "\n".join(f"  {match}" for match in matches[:_MAX_CANDIDATES])
    more = len(matches) - _MAX_CANDIDATES
    rest = f"\n  and {more:,} more" if more > 0 else ""
    return CliError(
        f"{text!r} matches {len(matches):,} {what}s:\n{shown}{rest}",
        "Give a longer prefix of the id.",
    )
