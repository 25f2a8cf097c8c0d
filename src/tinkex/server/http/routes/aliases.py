"""Alias endpoints: names that a tenant gives to checkpoints, for the inference endpoints."""

from __future__ import annotations

import re

from tinkex import clock
from tinkex.errors import BadRequestError, InvalidInput, NotFoundError
from tinkex.ids import parse_tinker_path
from tinkex.server.http.ownership import require_readable_checkpoint
from tinkex.server.http.request_context import Handler, RawResponse, RequestContext, Services
from tinkex.server.http.store_access import read, record_checkpoint_event, record_event, write
from tinkex.store import aliases
from tinkex.store.database import Connection
from tinkex.wire.messages import AliasMessage, AliasReply, ListAliasesReply

MAX_ALIASES = 1000
#: Without `/`, `:`, `;` and `@`, which other forms of model names have.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


async def set_alias(services: Services, context: RequestContext[AliasMessage]) -> AliasReply:
    """Let a name mean a checkpoint; an existing alias is moved in one transaction."""
    name, tenant_id = context.request.name, context.tenant_id
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"Invalid alias {name!r:.200}: use 1 to 128 letters, digits or . _ - and begin with a "
            "letter, digit or _"
        )
    path = parse_tinker_path(context.request.tinker_path)

    def transaction(db: Connection) -> AliasReply:
        now = clock.now()
        checkpoint = require_readable_checkpoint(db, {tenant_id}, path, now)
        before = aliases.find(db, tenant_id, name, now)
        aliases.delete_dangling(db, tenant_id, now)
        if before is None and aliases.count(db, tenant_id) >= MAX_ALIASES:
            raise BadRequestError(f"you have {MAX_ALIASES} aliases, the limit; remove one first")
        aliases.set_alias(db, tenant_id, name, checkpoint.id, now)
        record_checkpoint_event(
            db, context.identity, "checkpoint_alias_set", checkpoint, alias=name
        )
        previous = None if before is None else str(before.path)
        return AliasReply(name=name, tinker_path=str(path), previous_path=previous)

    return await write(services, transaction)


async def list_aliases(services: Services, context: RequestContext[object]) -> ListAliasesReply:
    """List the caller's aliases by name."""
    found = await read(services, lambda db: aliases.list_all(db, context.tenant_id, clock.now()))
    return ListAliasesReply(
        aliases=[AliasMessage(name=each.name, tinker_path=str(each.path)) for each in found]
    )


async def delete_alias(services: Services, context: RequestContext[object]) -> RawResponse:
    """Remove an alias; its checkpoint stays."""
    name = context.ids["alias"]

    def transaction(db: Connection) -> None:
        if not aliases.delete(db, context.tenant_id, name):
            raise NotFoundError(f"alias {name!r} does not exist")
        record_event(db, context.identity, "checkpoint_alias_removed", alias=name)

    await write(services, transaction)
    return RawResponse()


ROUTES: dict[str, Handler] = {
    "set_alias": set_alias,
    "list_aliases": list_aliases,
    "delete_alias": delete_alias,
}
