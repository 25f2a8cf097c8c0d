"""How a training run goes: its optimizer steps in pages, its speed and its queue."""

from __future__ import annotations

import time
from typing import Any

from tinkex import types
from tinkex.server.call import Call, Handler, Services
from tinkex.server.dashboard.progress import History, continued
from tinkex.server.dashboard.reading import status_of
from tinkex.server.ownership import run_of
from tinkex.server.run_steps import newest_steps, steps_after
from tinkex.server.run_summaries import summarize
from tinkex.server.transactions import read
from tinkex.server.updates import SPEED_PASSES, tokens_per_second
from tinkex.store import overview, steps
from tinkex.store.database import Connection

DEFAULT_LIMIT = 100
#: Steps from which the speed is read.
_LATEST_STEPS = 3 * SPEED_PASSES


async def get_run_metrics(services: Services, call: Call[Any]) -> types.RunMetricsResponse:
    """The newest steps of a run, or the first ones after a cursor."""
    run_id = call.ids["training_run_id"]
    limit = int(call.query.get("limit", DEFAULT_LIMIT))
    after = int(call.query["after"]) if "after" in call.query else None
    now = time.time()

    def look(db: Connection) -> types.RunMetricsResponse:
        run = run_of(db, call.tenant_id, run_id, "training run")
        found = (
            newest_steps(db, run, limit) if after is None else steps_after(db, run, after, limit)
        )
        summary = summarize(db, [run], now)[0]
        latest = continued(History(), steps.of_run(db, run_id, limit=_LATEST_STEPS))
        oldest_no = overview.oldest_step(db, run_id) or 0
        oldest = steps.between(db, run_id, oldest_no - 1, oldest_no)
        return types.RunMetricsResponse(
            training_run_id=run_id,
            steps=found,
            num_steps=run.num_steps,
            is_whole=continued(History(), oldest).is_whole,
            status=status_of(summary.session),
            state=summary.state,
            name=summary.name,
            loss=summary.metrics.get("loss"),
            tokens_per_second=tokens_per_second(latest.recent),
            num_waiting=summary.workload.num_queued,
            num_running=summary.workload.num_running,
        )

    return await read(services, look)


ROUTES: dict[str, Handler] = {"get_run_metrics": get_run_metrics}
