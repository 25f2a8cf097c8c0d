"""`tinkex usage` without a command: the last days on one screen."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from tinkex import clock
from tinkex.cli.client import admin_client
from tinkex.cli.commands.usage.spans import resolve_period
from tinkex.cli.context import Context
from tinkex.cli.output import show
from tinkex.cli.output.usage_summary import UsageSummary
from tinkex.errors import NotFoundError

if TYPE_CHECKING:
    from tinkex.client.admin import AdminClient
    from tinkex.types.billing import QuotaUsage


def show_summary(context: Context, days: int) -> None:
    """Print a line per model, and what storage takes."""
    start, end = resolve_period(None, None, clock.utc_now(), timedelta(days=days))
    with admin_client(context) as client:
        used = client.get_billing_usage(start, end).result()
        stored = client.get_current_checkpoint_storage_usage().result()
        quotas = _fetch_quotas(client)
    show(context, UsageSummary(used, stored, quotas, start, end))


def _fetch_quotas(client: AdminClient) -> list[QuotaUsage]:
    """The quotas of the caller; none where a server does not know them."""
    try:
        return client.get_quotas().result().quotas
    except NotFoundError:
        return []
