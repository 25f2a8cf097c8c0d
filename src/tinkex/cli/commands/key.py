"""`tinkex key`: manage API keys and quotas directly in the server's database.

The server does not need to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex import clock
from tinkex.cli.commands.serve import home_option
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import missing_extra_error
from tinkex.cli.format import format_timestamp
from tinkex.cli.options import F, Group
from tinkex.cli.output import Column, PropertiesOutput, TableOutput, announce, show
from tinkex.cli.output.base import list_title
from tinkex.errors import ConfigError, InvalidInput
from tinkex.ids import MAX_LABEL_CHARS, is_label

if TYPE_CHECKING:
    from tinkex.store.database import Connection, Database
    from tinkex.store.records import ApiKeyRecord, TenantRecord

COLUMNS = {
    "id": Column("ID", is_number=True),
    "tenant": Column("Tenant"),
    "name": Column("Name"),
    "key": Column("Key"),
    "created": Column("Created", 2),
    "revoked": Column("Revoked", 1),
    "note": Column("Note", 3),
}
_QUOTA_RANGE = click.IntRange(0, 2**62)


@click.group(cls=Group)
def key() -> None:
    """Create, list and revoke API keys of a server; set quotas."""


def store_options(command: F) -> F:
    """Add --home and --store, which select the database."""
    store = click.option("--store", metavar="URL", help="Database URL, if it is not in the home.")
    return home_option(store(command))


@key.command()
@store_options
@click.option(
    "--tenant", default="default", show_default=True, help="Tenant that the key belongs to."
)
@click.option("--name", default="key", show_default=True, help="Name of the key.")
@click.option("--note", help="Free-form note.")
@pass_context
def create(
    context: Context,
    home: Path | None,
    store: str | None,
    tenant: str,
    name: str,
    note: str | None,
) -> None:
    """Create a key and print it once. Creates the tenant if it does not exist."""
    _check_name("tenant", tenant)
    _check_name("name", name)
    with open_server_store(home, store) as database:
        from tinkex.store import keys

        secret, now = keys.generate_key(), clock.now()
        created = database.write(
            lambda db: keys.insert_key(
                db,
                keys.get_or_create_tenant(db, tenant, now).id,
                secret,
                name=name,
                note=note,
                now=now,
            )
        )
    if context.is_json:
        data = {"id": created.id, "tenant": tenant, "name": name, "note": note, "key": secret}
        show(context, PropertiesOutput(data))
        return
    click.echo(f"key {created.id} of tenant {tenant!r}; save it, it is not shown again:", err=True)
    click.echo(secret)


@key.command("list")
@store_options
@pass_context
def list_keys(context: Context, home: Path | None, store: str | None) -> None:
    """List all keys by their first characters, oldest first."""
    with open_server_store(home, store) as database:
        from tinkex.store import keys

        records = database.read(keys.list_keys)
    rows = [_key_row(record, tenant) for record, tenant in records]
    shown = [
        {
            **_key_row(record, tenant),
            "created": _format_optional_time(record.created_at),
            "revoked": _format_optional_time(record.revoked_at),
        }
        for record, tenant in records
    ]
    show(context, TableOutput(shown, COLUMNS, list_title(len(rows), 0, "key"), data=rows))


@key.command()
@store_options
@click.argument("key_id", type=int, metavar="ID")
@pass_context
def revoke(context: Context, home: Path | None, store: str | None, key_id: int) -> None:
    """Revoke a key; a running server rejects it within two seconds."""
    with open_server_store(home, store) as database:
        from tinkex.store import keys

        now = clock.now()
        was_active = database.write(lambda db: keys.revoke(db, key_id, now))
    if not was_active:
        raise InvalidInput(
            f"no active key has the id {key_id}",
            hint="`tinkex key list` lists all keys.",
        )
    announce(context, f"key {key_id} is revoked", {"id": key_id, "revoked": True})


@key.command()
@store_options
@click.option(
    "--tenant", default="default", show_default=True, help="Tenant whose quotas to show or set."
)
@click.option(
    "--models", type=_QUOTA_RANGE, help="Maximum number of models in unfinished sessions."
)
@click.option("--checkpoints", type=_QUOTA_RANGE, help="Maximum number of stored checkpoints.")
@click.option(
    "--stored-bytes", type=_QUOTA_RANGE, help="Maximum total size of stored checkpoints, in bytes."
)
@click.option(
    "--tokens-per-hour",
    type=_QUOTA_RANGE,
    help="Maximum number of trained, prompt and sampled tokens per hour.",
)
@click.option(
    "--sessions-per-hour", type=_QUOTA_RANGE, help="Maximum number of sessions created per hour."
)
@click.option("--reset", is_flag=True, help="Reset to the server's settings first.")
@pass_context
def quota(
    context: Context,
    /,
    home: Path | None,
    store: str | None,
    tenant: str,
    reset: bool,
    **limits: int | None,
) -> None:
    """Show or set a tenant's quotas; 0 is unlimited. A running server applies them at once.

    Quotas that are not set for a tenant follow the server's settings, such as
    max_models_per_tenant.
    """
    changes = {name: limit for name, limit in limits.items() if limit is not None}
    with open_server_store(home, store) as database:
        own = database.write(lambda db: _set_quotas(db, tenant, changes, is_reset=reset))
    from tinkex.store.quotas import Quotas

    names = Quotas.names()
    if context.is_json:
        show(
            context,
            PropertiesOutput({"tenant": tenant, "quotas": {name: own.get(name) for name in names}}),
        )
        return
    rows = [{"quota": name, "limit": _format_limit(own.get(name))} for name in names]
    show(context, TableOutput(rows, {"quota": Column("Quota"), "limit": Column("Limit")}, None))


def _set_quotas(
    db: Connection, tenant: str, changes: dict[str, int], *, is_reset: bool
) -> dict[str, int]:
    from tinkex.store import keys, quotas

    record = keys.find_tenant_by_name(db, tenant)
    if record is None:
        raise InvalidInput(
            f"no tenant is named {tenant!r}", hint="`tinkex key list` lists all tenants."
        )
    own = changes if is_reset else {**(record.quotas or {}), **changes}
    if changes or is_reset:
        quotas.set_overrides(db, record.id, own or None)
    return dict(own)


def _format_limit(limit: int | None) -> str:
    if limit is None:
        return "server default"
    return f"{limit:,}" if limit else "unlimited"


@contextlib.contextmanager
def open_server_store(home: Path | None, store: str | None) -> Iterator[Database]:
    """Open the configured database, and create it if it does not exist."""
    try:
        from tinkex.server.config_sources import read_config
        from tinkex.server.wiring import open_store
    except ModuleNotFoundError as error:
        raise missing_extra_error(error, "server") from error
    with open_store(read_config({"home": home, "store": store})) as database:
        yield database


def _key_row(record: ApiKeyRecord, tenant: TenantRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "tenant": tenant.name,
        "name": record.name,
        "key": record.hint,
        "created": _iso_time(record.created_at),
        "revoked": _iso_time(record.revoked_at),
        "note": record.note,
    }


def _iso_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _format_optional_time(seconds: float | None) -> str | None:
    """Format a time like other tables; a key that is not revoked has an empty cell."""
    return None if seconds is None else format_timestamp(_iso_time(seconds))


def _check_name(option: str, text: str) -> None:
    if not is_label(text):
        raise ConfigError(
            f"--{option} is {text!r}; expected 1 to {MAX_LABEL_CHARS} printable characters "
            "without surrounding spaces"
        )
