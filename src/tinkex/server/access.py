"""Who may read a checkpoint besides its owner: whoever shows a credential of the owner."""

from __future__ import annotations

from typing import Any, Final

from tinkex.server.auth import identify
from tinkex.server.call import RequestContext, Services

#: Carries a credential of the tenant that owns the weights.
WEIGHTS_TOKEN_HEADER: Final = "x-tinker-weights-access-token"


async def resolve_readers(
    services: Services, context: RequestContext[Any], token: str | None = None
) -> frozenset[str]:
    """The tenants in whose name a request may read: the caller, and who lent a credential."""
    given = context.headers.get(WEIGHTS_TOKEN_HEADER) or token
    if not given:
        return frozenset({context.tenant_id})
    lender = await identify(services, given)
    # A credential that opens nothing is not worth an answer of its own: it would tell a guesser.
    return frozenset(
        {context.tenant_id, lender.tenant_id if lender is not None else context.tenant_id}
    )
