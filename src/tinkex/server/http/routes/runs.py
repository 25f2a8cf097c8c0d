"""Training run endpoints: lists, names, and metrics of optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinkex import clock, types
from tinkex.errors import NotFoundError, UnprocessableEntityError
from tinkex.server.http.ownership import require_run
from tinkex.server.http.request_context import Handler, RequestContext, Services
from tinkex.server.http.run_history import (
    NUM_SPEED_PASSES,
    RunHistory,
    extend_history,
    list_newest_steps,
    list_steps_after,
    tokens_per_second,
)
from tinkex.server.http.run_summaries import summarize_runs
from tinkex.server.http.serializers import run_session_status, serialize_run
from tinkex.server.http.store_access import read, write
from tinkex.server.http.validation import check_number, parse_page
from tinkex.store import checkpoints, runs, stats, steps
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, RunRecord
from tinkex.store.write_locks import SHARED
from tinkex.wire.messages import RenameRunRequest, ReportMetricsRequest, SetRunTagsRequest

DEFAULT_LIMIT = 20
MAX_NAME_CHARS = 120
MAX_TAGS, MAX_TAG_CHARS = 16, 40


async def list_runs(
    services: Services, context: RequestContext[object]
) -> types.TrainingRunsResponse:
    """List a page of training runs, newest first."""
    limit, offset = parse_page(context, DEFAULT_LIMIT)

    def query(db: Connection) -> types.TrainingRunsResponse:
        records, total = runs.list_page(
            db,
            context.tenant_id,
            limit=limit,
            offset=offset,
            with_public=_is_public_included(context),
            project_id=context.query.get("project_id"),
            search=context.query.get("search"),
        )
        cursor = types.Cursor(offset=offset, limit=limit, total_count=total)
        serialized = _serialize_runs(db, context.tenant_id, records)
        return types.TrainingRunsResponse(training_runs=serialized, cursor=cursor)

    return await read(services, query)


async def get_run(services: Services, context: RequestContext[object]) -> types.TrainingRun:
    """Return one training run, loaded or not."""
    run_id = context.ids["training_run_id"]

    def query(db: Connection) -> types.TrainingRun:
        run = runs.find(db, run_id)
        if run is None or not _can_see(db, context, run):
            raise NotFoundError(f"training run {run_id!r} does not exist")
        return _serialize_runs(db, context.tenant_id, [run])[0]

    return await read(services, query)


async def rename_run(
    services: Services, context: RequestContext[RenameRunRequest]
) -> dict[str, object]:
    """Set or remove the name of a training run."""
    name = check_run_name(context.request.name)

    def transaction(db: Connection) -> None:
        run = require_run(db, context.tenant_id, context.ids["training_run_id"], "training run")
        runs.rename(db, run, name)

    await write(services, transaction)
    return {}


async def set_run_tags(
    services: Services, context: RequestContext[SetRunTagsRequest]
) -> dict[str, object]:
    """Replace the tags of a training run."""
    tags = check_run_tags(context.request.tags)

    def transaction(db: Connection) -> None:
        run = require_run(db, context.tenant_id, context.ids["training_run_id"], "training run")
        runs.set_tags(db, run, tags)

    await write(services, transaction)
    return {}


def check_run_tags(tags: Sequence[str]) -> list[str]:
    """Return tags without surrounding spaces and repetitions."""
    unique = list(dict.fromkeys(tag.strip() for tag in tags))
    if len(unique) > MAX_TAGS:
        raise UnprocessableEntityError(
            f"tags has {len(unique)} entries, expected at most {MAX_TAGS}"
        )
    for tag in unique:
        if not 1 <= len(tag) <= MAX_TAG_CHARS or not tag.isprintable():
            raise UnprocessableEntityError(
                f"tags has {tag[:40]!r}, expected 1 to {MAX_TAG_CHARS} printable characters"
            )
    return unique


def check_run_name(name: str | None) -> str | None:
    """Return a name without surrounding spaces; None if it is empty."""
    stripped = (name or "").strip()
    if len(stripped) > MAX_NAME_CHARS or not stripped.isprintable():
        raise UnprocessableEntityError(
            f"name is {stripped[:40]!r}, expected 1 to {MAX_NAME_CHARS} printable characters"
        )
    return stripped or None


def _is_public_included(context: RequestContext[object]) -> bool:
    return context.query.get("access_scope") == "accessible"


def _can_see(db: Connection, context: RequestContext[object], run: RunRecord) -> bool:
    if run.tenant_id == context.tenant_id:
        return True
    return _is_public_included(context) and bool(_published_checkpoints(db, run.id))


def _serialize_runs(
    db: Connection, tenant_id: str, records: Sequence[RunRecord]
) -> list[types.TrainingRun]:
    newest: dict[str, dict[str, CheckpointRecord]] = {run.id: {} for run in records}
    run_ids = list(newest)
    for (run_id, segment), checkpoint in checkpoints.newest_by_run(
        db, run_ids, clock.now()
    ).items():
        newest[run_id][segment] = checkpoint
    for run in records:
        has_private = any(not checkpoint.is_public for checkpoint in newest[run.id].values())
        if run.tenant_id != tenant_id and has_private:
            newest[run.id] = _published_checkpoints(db, run.id)
    own_runs = [run for run in records if run.tenant_id == tenant_id]
    summaries = {each.run.id: each for each in summarize_runs(db, own_runs, clock.now())}
    return [serialize_run(run, newest[run.id], summaries.get(run.id)) for run in records]


def _published_checkpoints(db: Connection, run_id: str) -> dict[str, CheckpointRecord]:
    """The newest published checkpoint of each segment: other tenants see only these."""
    newest: dict[str, CheckpointRecord] = {}
    for checkpoint in checkpoints.list_by_run(db, run_id, clock.now()):
        if checkpoint.is_public:
            newest.setdefault(checkpoint.segment, checkpoint)
    return newest


ROUTES: dict[str, Handler] = {
    "list_training_runs": list_runs,
    "get_training_run": get_run,
    "rename_training_run": rename_run,
    "set_training_run_tags": set_run_tags,
}


DEFAULT_NUM_STEPS = 100
#: Limits of one report.
MAX_METRICS, MAX_METRIC_CHARS = 64, 64
#: Number of step records from which the speed is measured.
_NUM_SPEED_STEPS = 3 * NUM_SPEED_PASSES


async def get_run_metrics(
    services: Services, context: RequestContext[object]
) -> types.RunMetricsResponse:
    """Return the newest steps of a run, or the first ones after a cursor."""
    run_id = context.ids["training_run_id"]
    limit = int(context.query.get("limit", DEFAULT_NUM_STEPS))
    after = int(context.query["after"]) if "after" in context.query else None
    now = clock.now()

    def query(db: Connection) -> types.RunMetricsResponse:
        run = require_run(db, context.tenant_id, run_id, "training run")
        run_steps = (
            list_newest_steps(db, run, limit)
            if after is None
            else list_steps_after(db, run, after, limit)
        )
        summary = summarize_runs(db, [run], now)[0]
        latest = extend_history(RunHistory(), steps.list_by_run(db, run_id, limit=_NUM_SPEED_STEPS))
        oldest_no = stats.oldest_step_no(db, run_id) or 0
        oldest = steps.list_between(db, run_id, oldest_no - 1, oldest_no)
        return types.RunMetricsResponse(
            training_run_id=run_id,
            steps=run_steps,
            num_steps=run.num_steps,
            is_whole=extend_history(RunHistory(), oldest).is_whole,
            status=run_session_status(summary.session),
            state=summary.state,
            name=summary.name,
            loss=summary.metrics.get("loss"),
            tokens_per_second=tokens_per_second(latest.recent),
            num_waiting=summary.workload.num_queued,
            num_running=summary.workload.num_running,
        )

    return await read(services, query)


async def report_run_metrics(
    services: Services, context: RequestContext[ReportMetricsRequest]
) -> dict[str, object]:
    """Add client metrics to one of the run's optimizer steps."""
    run_id = context.ids["training_run_id"]
    position = context.request.seq_id
    check_number("seq_id", position)
    metrics = _check_metrics(context.request.metrics)

    def transaction(db: Connection) -> None:
        require_run(db, context.tenant_id, run_id, "training run")
        if not steps.add_metrics(db, run_id, position, metrics):
            raise NotFoundError(f"run {run_id!r} has no finished optimizer step {position}")

    await write(services, transaction, SHARED)
    return {}


def _check_metrics(metrics: Mapping[str, float]) -> Mapping[str, float]:
    if not 1 <= len(metrics) <= MAX_METRICS:
        raise UnprocessableEntityError(
            f"metrics has {len(metrics)} entries, expected 1 to {MAX_METRICS}"
        )
    for name in metrics:
        if not 1 <= len(name) <= MAX_METRIC_CHARS or not name.isprintable():
            raise UnprocessableEntityError(
                f"metrics has the name {name[:40]!r}, expected 1 to {MAX_METRIC_CHARS} printable "
                "characters"
            )
    return metrics


RUN_METRICS_ROUTES: dict[str, Handler] = {
    "get_run_metrics": get_run_metrics,
    "report_run_metrics": report_run_metrics,
}
