"""Who looks at the pages: whoever shows a key, or sits at the machine that serves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litestar import Request

from tinkex.server.arrivals import is_local, read_origin
from tinkex.server.auth import identify
from tinkex.server.call import Services
from tinkex.server.keys_file import DEFAULT_TENANT
from tinkex.server.transactions import read
from tinkex.store import keys, overview
from tinkex.store.records import TenantRecord

COOKIE_NAME = "tinkex_look"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Whose things are shown, and why."""

    tenant: TenantRecord
    is_local: bool
    """Whether no key was asked for."""


async def find_visitor(services: Services, request: Request[Any, Any, Any]) -> Visitor | None:
    """Who looks; None if a key must be asked for."""
    token = request.cookies.get(COOKIE_NAME)
    identity = await identify(services, token) if token else None
    if identity is not None:
        owner_id = identity.tenant_id
        tenant = await read(services, lambda db: keys.find_tenant(db, owner_id))
        return None if tenant is None else Visitor(tenant=tenant, is_local=False)
    if not is_local(services.config.host, read_origin(request)):
        return None
    tenant = await read(services, lambda db: overview.find_tenant_by_name(db, DEFAULT_TENANT))
    return None if tenant is None else Visitor(tenant=tenant, is_local=True)
