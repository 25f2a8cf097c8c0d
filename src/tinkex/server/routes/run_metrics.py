"""How a training run goes: its optimizer steps in pages, its speed and its queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex import clock, types
from tinkex.errors import NotFoundError, UnprocessableEntityError
from tinkex.server.call import Handler, RequestContext, Services
from tinkex.server.checks import check_number
from tinkex.server.dashboard.progress import RunHistory, extend_history
from tinkex.server.dashboard.reading import run_session_status
from tinkex.server.ownership import require_run
from tinkex.server.run_steps import list_newest_steps, list_steps_after
from tinkex.server.run_summaries import summarize_runs
from tinkex.server.transactions import read, write
from tinkex.server.updates import NUM_SPEED_PASSES, tokens_per_second
from tinkex.store import overview, steps
from tinkex.store.database import Connection
from tinkex.wire.messages import ReportMetricsRequest

DEFAULT_NUM_STEPS = 100
#: Of one report.
MAX_METRICS, MAX_METRIC_CHARS = 64, 64
#: Steps from which the speed is read.
_NUM_SPEED_STEPS = 3 * NUM_SPEED_PASSES


async def get_run_metrics(
    services: Services, context: RequestContext[Any]
) -> types.RunMetricsResponse:
    """The newest steps of a run, or the first ones after a cursor."""
    run_id = context.ids["training_run_id"]
    limit = int(context.query.get("limit", DEFAULT_NUM_STEPS))
    after = int(context.query["after"]) if "after" in context.query else None
    now = clock.now()

    def look(db: Connection) -> types.RunMetricsResponse:
        run = require_run(db, context.tenant_id, run_id, "training run")
        found = (
            list_newest_steps(db, run, limit)
            if after is None
            else list_steps_after(db, run, after, limit)
        )
        summary = summarize_runs(db, [run], now)[0]
        latest = extend_history(RunHistory(), steps.list_by_run(db, run_id, limit=_NUM_SPEED_STEPS))
        oldest_no = overview.oldest_step_no(db, run_id) or 0
        oldest = steps.list_between(db, run_id, oldest_no - 1, oldest_no)
        return types.RunMetricsResponse(
            training_run_id=run_id,
            steps=found,
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

    return await read(services, look)


async def report_run_metrics(
    services: Services, context: RequestContext[ReportMetricsRequest]
) -> dict[str, Any]:
    """Add what a client measured to one of its optimizer steps."""
    run_id = context.ids["training_run_id"]
    position = context.request.seq_id
    check_number("seq_id", position)
    metrics = _check_metrics(context.request.metrics)

    def change(db: Connection) -> None:
        require_run(db, context.tenant_id, run_id, "training run")
        if not steps.add_metrics(db, run_id, position, metrics):
            raise NotFoundError(f"run {run_id!r} has no finished optimizer step {position}")

    await write(services, change)
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
