"""A run's steps as the server tells them, page by page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import RunMetricsResponse, RunStep

PAGE_SIZE = 1000


def fetch_run_metrics(
    client: RestClient, run_id: str, limit: int = PAGE_SIZE, after: int | None = None
) -> RunMetricsResponse:
    """Some steps of a run; a server that tells none gets a sentence of its own."""
    from tinkex.cli.errors import CliError
    from tinkex.errors import NotFoundError

    try:
        return client.get_run_metrics(run_id, limit, after).result()
    except NotFoundError as error:
        # Raises the same in other words if it is the run that is not there.
        client.get_training_run(run_id).result()
        raise CliError(
            "This server does not tell how its training runs go",
            "A tinkex server does; `tinkex run info` shows what this one knows.",
        ) from error


def fetch_all_steps(
    client: RestClient,
    run_id: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    page_size: int = PAGE_SIZE,
) -> tuple[RunMetricsResponse, list[RunStep]]:
    """How a run stands, and every step of it that the server remembers."""
    page = fetch_run_metrics(client, run_id, page_size, after=0)
    steps = list(page.steps)
    while page.steps and len(page.steps) >= page_size:
        on_progress(len(steps), page.num_steps)
        page = fetch_run_metrics(client, run_id, page_size, after=steps[-1].cursor)
        steps += page.steps
    on_progress(len(steps), len(steps))
    return page, steps
