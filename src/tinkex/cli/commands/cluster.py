"""`tinkex cluster`: the worker groups of a server, directly from its database."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex import clock
from tinkex.cli.commands.key import open_server_store, store_options
from tinkex.cli.context import Context, pass_context
from tinkex.cli.format import format_timestamp
from tinkex.cli.options import Group
from tinkex.cli.output import Column, TableOutput, announce, show
from tinkex.cli.output.base import list_title
from tinkex.display import format_count
from tinkex.errors import InvalidInput, StoreBusy

if TYPE_CHECKING:
    from tinkex.store.clusters import ClusterReport
    from tinkex.store.database import Connection, Database
    from tinkex.store.records import GroupRecord

COLUMNS = {
    "group": Column("Group"),
    "state": Column("State"),
    "host": Column("Host", 2),
    "models": Column("Models", is_number=True),
    "queued_seconds": Column("Queued s", is_number=True),
    "base_models": Column("Base models", 3),
    "seen": Column("Seen", 1),
}
#: The group of a server with one worker has an empty id.
DEFAULT_GROUP = "default"
_POLL_SECONDS = 0.2


@click.group(cls=Group)
def cluster() -> None:
    """Show and drain the worker groups of a server."""


@cluster.command()
@store_options
@pass_context
def status(context: Context, home: Path | None, store: str | None) -> None:
    """List the worker groups: their state, models and queued work."""
    with open_server_store(home, store) as database:
        records, report = database.read(lambda db: (_list_groups(db), _read_report(db)))
    started = {group.id: group for group in report.groups} if report is not None else {}
    rows = [
        {**_group_row(group, num_models), "pid": started[group.id].pid}
        if group.id in started
        else _group_row(group, num_models)
        for group, num_models in records
    ]
    shown = [
        {
            **row,
            "base_models": ", ".join(_model_names(group)),
            "seen": format_timestamp(_iso_time(group.seen_at)),
        }
        for row, (group, _) in zip(rows, records, strict=True)
    ]
    show(context, TableOutput(shown, COLUMNS, list_title(len(rows), 0, "group"), data=rows))


def _list_groups(db: Connection) -> list[tuple[GroupRecord, int]]:
    from tinkex.store import groups

    return [(group, groups.count_runs_of(db, group.id)) for group in groups.list_current(db)]


def _read_report(db: Connection) -> ClusterReport | None:
    from tinkex.store import clusters

    return clusters.read_report(db)


def _group_row(group: GroupRecord, num_models: int) -> dict[str, object]:
    return {
        "group": group.id or DEFAULT_GROUP,
        "state": _describe_state(group),
        "host": group.host,
        "pid": 0,
        "models": num_models,
        "queued_seconds": round(group.load.get("queued_seconds", 0.0), 1),
        "base_models": _model_names(group),
        "seen": _iso_time(group.seen_at),
    }


def _model_names(group: GroupRecord) -> list[str]:
    return [str(model["name"]) for model in group.base_models]


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _describe_state(group: GroupRecord) -> str:
    from tinkex.jobs.wakeup import ALIVE_SECONDS

    return group.state if group.seen_at > clock.now() - ALIVE_SECONDS else "lost"


@cluster.command()
@store_options
@click.argument("group")
@click.option(
    "--timeout",
    type=click.FloatRange(0.0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the models are handed over; 0 does not wait.",
)
@pass_context
def drain(
    context: Context, home: Path | None, store: str | None, group: str, timeout: float
) -> None:
    """Hand the models of a group over to the other groups.

    A worker started with `tinkex worker` then ends; a worker of `tinkex serve` restarts.
    """
    with open_server_store(home, store) as database:
        group_id = "" if group == DEFAULT_GROUP else group
        num_models = database.write(lambda db: _request_drain(db, group_id, group))
        _wait_until_drained(database, group_id, group, timeout)
    announce(
        context,
        f"group {group} hands over {format_count(num_models, 'model')}"
        if timeout == 0
        else f"group {group} has handed over {format_count(num_models, 'model')}",
        {"group": group, "models": num_models},
    )


def _request_drain(db: Connection, group_id: str, name: str) -> int:
    from tinkex.store import groups
    from tinkex.store.records import GroupState

    current = groups.list_current(db)
    if group_id not in {group.id for group in current}:
        raise InvalidInput(
            f"group {name!r} does not exist", hint="`tinkex cluster status` lists all groups."
        )
    if not any(group.id != group_id and group.state == GroupState.READY for group in current):
        raise InvalidInput(
            f"no other group can take the models of {name!r}",
            hint="Start one with `tinkex worker`, or stop the server.",
        )
    groups.set_state(db, group_id, GroupState.DRAINING)
    return groups.count_runs_of(db, group_id)


def _wait_until_drained(database: Database, group_id: str, name: str, timeout: float) -> None:
    from tinkex.store import groups
    from tinkex.store.records import GroupState

    ends_at = time.monotonic() + timeout
    while timeout > 0:
        group = database.read(lambda db: groups.find(db, group_id))
        if group is None or group.state != GroupState.DRAINING:
            return
        if time.monotonic() > ends_at:
            raise StoreBusy(
                f"group {name!r} has not handed over its models within {timeout:g} seconds",
                hint="It goes on; `tinkex cluster status` shows how many are left.",
            )
        time.sleep(_POLL_SECONDS)
