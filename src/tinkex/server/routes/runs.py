"""Lists of training runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinkex import clock, types
from tinkex.errors import NotFoundError, UnprocessableEntityError
from tinkex.server.call import Handler, RequestContext, Services
from tinkex.server.checks import parse_page
from tinkex.server.describe import serialize_run
from tinkex.server.ownership import require_run
from tinkex.server.run_summaries import summarize_runs
from tinkex.server.transactions import read, write
from tinkex.store import checkpoints, runs
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord
from tinkex.wire.messages import RenameRunRequest

DEFAULT_LIMIT = 20
MAX_NAME_CHARS = 120


async def list_runs(services: Services, context: RequestContext[Any]) -> types.TrainingRunsResponse:
    """A page of training runs, newest first."""
    limit, offset = parse_page(context, DEFAULT_LIMIT)

    def look(db: Connection) -> types.TrainingRunsResponse:
        found, total = runs.list_page(
            db,
            context.tenant_id,
            limit=limit,
            offset=offset,
            with_public=_is_public_included(context),
            project_id=context.query.get("project_id"),
            search=context.query.get("search"),
        )
        cursor = types.Cursor(offset=offset, limit=limit, total_count=total)
        shown = _serialize_runs(db, context.tenant_id, found)
        return types.TrainingRunsResponse(training_runs=shown, cursor=cursor)

    return await read(services, look)


async def get_run(services: Services, context: RequestContext[Any]) -> types.TrainingRun:
    """One training run; that it is not in memory does not matter."""
    run_id = context.ids["training_run_id"]

    def look(db: Connection) -> types.TrainingRun:
        found = runs.find(db, run_id)
        if found is None or not _can_see(db, context, found):
            raise NotFoundError(f"there is no training run {run_id!r}")
        return _serialize_runs(db, context.tenant_id, [found])[0]

    return await read(services, look)


async def rename_run(
    services: Services, context: RequestContext[RenameRunRequest]
) -> dict[str, Any]:
    """Name a training run, or take its name away."""
    name = check_run_name(context.request.name)

    def change(db: Connection) -> None:
        run = require_run(db, context.tenant_id, context.ids["training_run_id"], "training run")
        runs.rename(db, run, name)

    await write(services, change)
    return {}


def check_run_name(name: str | None) -> str | None:
    """A name on one line without spaces around it; None if nothing is left."""
    stripped = (name or "").strip()
    if len(stripped) > MAX_NAME_CHARS or not stripped.isprintable():
        raise UnprocessableEntityError(
            f"name is {stripped[:40]!r}, expected 1 to {MAX_NAME_CHARS} printable characters"
        )
    return stripped or None


def _is_public_included(context: RequestContext[Any]) -> bool:
    return context.query.get("access_scope") == "accessible"


def _can_see(db: Connection, context: RequestContext[Any], run: RunRecord) -> bool:
    if run.tenant_id == context.tenant_id:
        return True
    return _is_public_included(context) and bool(_published_checkpoints(db, run.id))


def _serialize_runs(
    db: Connection, tenant_id: str, found: Sequence[RunRecord]
) -> list[types.TrainingRun]:
    newest: dict[str, dict[str, CheckpointRecord]] = {run.id: {} for run in found}
    run_ids = list(newest)
    for (run_id, segment), checkpoint in checkpoints.newest_by_run(
        db, run_ids, clock.now()
    ).items():
        newest[run_id][segment] = checkpoint
    for run in found:
        is_hidden = any(not checkpoint.is_public for checkpoint in newest[run.id].values())
        if run.tenant_id != tenant_id and is_hidden:
            newest[run.id] = _published_checkpoints(db, run.id)
    own = [run for run in found if run.tenant_id == tenant_id]
    summaries = {each.run.id: each for each in summarize_runs(db, own, clock.now())}
    return [serialize_run(run, newest[run.id], summaries.get(run.id)) for run in found]


def _published_checkpoints(db: Connection, run_id: str) -> dict[str, CheckpointRecord]:
    """The newest published checkpoint of each segment: all that others see of a run."""
    newest: dict[str, CheckpointRecord] = {}
    for checkpoint in checkpoints.list_by_run(db, run_id, clock.now()):
        if checkpoint.is_public:
            newest.setdefault(checkpoint.segment, checkpoint)
    return newest


ROUTES: dict[str, Handler] = {
    "list_training_runs": list_runs,
    "get_training_run": get_run,
    "rename_training_run": rename_run,
}
