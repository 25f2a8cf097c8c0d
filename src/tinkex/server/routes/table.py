"""Who answers which row of the endpoint table, and what is served besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from litestar.types import ControllerRouterHandler

from tinkex.server.call import Handler
from tinkex.server.dashboard.pages import HANDLERS as PAGES
from tinkex.server.downloads import HANDLERS as DOWNLOADS
from tinkex.server.routes import (
    checkpoints,
    futures,
    run_metrics,
    runs,
    sampling,
    service,
    sessions,
    tokenizers,
    training,
    upkeep,
    usage,
    weights,
)

ROUTES: Mapping[str, Handler] = {
    **service.ROUTES,
    **futures.ROUTES,
    **training.ROUTES,
    **weights.ROUTES,
    **sampling.ROUTES,
    **runs.ROUTES,
    **run_metrics.RUN_METRICS_ROUTES,
    **checkpoints.ROUTES,
    **tokenizers.ROUTES,
    **sessions.ROUTES,
    **usage.ROUTES,
}
"""Every endpoint's handler by its name in the table."""

EXTRA_HANDLERS: Sequence[ControllerRouterHandler] = (*upkeep.HANDLERS, *DOWNLOADS, *PAGES)
"""Routes that are no rows of the table."""
