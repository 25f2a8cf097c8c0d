"""`tinkex cluster`: the worker groups of a server, directly from its database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from tinkex import clock
from tinkex.cli.commands.key import open_server_store, store_options
from tinkex.cli.context import Context, pass_context
from tinkex.cli.format import format_timestamp
from tinkex.cli.options import Group
from tinkex.cli.output import Column, TableOutput, announce, show
from tinkex.cli.output.base import list_title
from tinkex.display import format_count
from tinkex.errors import ConfigError, InvalidInput, StoreBusy

if TYPE_CHECKING:
    from tinkex.store.clusters import ClusterReport, GroupReport
    from tinkex.store.database import Connection, Database
    from tinkex.store.records import GroupRecord

COLUMNS = {
    "group": Column("Group"),
    "state": Column("State"),
    "host": Column("Host", 2),
    "models": Column("Models", is_number=True),
    "queued_seconds": Column("Queued s", is_number=True),
    "busy": Column("Busy", 2, is_number=True),
    "base_models": Column("Base models", 3),
    "seen": Column("Seen", 1),
}
#: The group of a server with one worker has an empty id.
DEFAULT_GROUP = "default"
_POLL_SECONDS = 0.2


NODE_COLUMNS = {
    "node": Column("Node"),
    "host": Column("Host"),
    "address": Column("Address", 2),
    "state": Column("State"),
    "resources": Column("Resources", 1),
    "groups": Column("Groups", 1),
}
#: A controller that has not reported for this time does not run.
CONTROLLER_SECONDS = 60.0


@click.group(cls=Group)
def cluster() -> None:
    """Show, scale and drain the worker groups of a server."""


@cluster.command()
@store_options
@pass_context
def status(context: Context, home: Path | None, store: str | None) -> None:
    """List the worker groups: their state, models and queued work."""
    with open_server_store(home, store) as database:
        records, report, is_up = database.read(
            lambda db: (_list_groups(db), _read_report(db), _is_up(db))
        )
    registered = {group.id for group, _ in records}
    started = {group.id: group for group in report.groups} if report is not None else {}
    rows = [_group_row(group, num_models, started.get(group.id)) for group, num_models in records]
    if not is_up:
        rows = [_stopped_row(row) if _is_on_ray(row) and not row["pid"] else row for row in rows]
    rows += [_starting_row(group) for group in started.values() if group.id not in registered]
    shown = [
        {
            **row,
            "base_models": ", ".join(map(str, row["base_models"])),
            "seen": format_timestamp(row["seen"]) if row["seen"] else "-",
        }
        for row in rows
    ]
    show(context, TableOutput(shown, COLUMNS, list_title(len(rows), 0, "group"), data=rows))


@cluster.command()
@store_options
@pass_context
def nodes(context: Context, home: Path | None, store: str | None) -> None:
    """List the nodes of the Ray cluster, with the groups on each."""
    with open_server_store(home, store) as database:
        report = _require_report(database)
    rows = [
        {
            "node": node.id,
            "host": node.host,
            "address": node.address,
            "state": "alive" if node.is_alive else "lost",
            "resources": dict(node.resources),
            "groups": list(node.groups),
        }
        for node in sorted(report.nodes, key=lambda node: (not node.is_alive, node.host, node.id))
    ]
    shown = [
        {
            **row,
            "node": node_id[:12],
            "resources": ", ".join(f"{name} {amount:g}" for name, amount in amounts.items()),
            "groups": ", ".join(names),
        }
        for row, node_id, amounts, names in (
            (row, str(row["node"]), _shown_resources(row["resources"]), row["groups"])
            for row in rows
        )
    ]
    show(context, TableOutput(shown, NODE_COLUMNS, list_title(len(rows), 0, "node"), data=rows))


@cluster.command()
@store_options
@pass_context
def up(context: Context, home: Path | None, store: str | None) -> None:
    """Start the groups that `tinkex cluster down` has stopped, with their models."""
    with open_server_store(home, store) as database:
        _require_report(database)
        _change_target(database, is_up=True)
    announce(context, "the groups of all pools are started", {"is_up": True})


@cluster.command()
@store_options
@pass_context
def down(context: Context, home: Path | None, store: str | None) -> None:
    """Stop all groups of the Ray cluster; their models continue after `tinkex cluster up`.

    Requests are accepted meanwhile and wait.
    """
    with open_server_store(home, store) as database:
        _require_report(database)
        _change_target(database, is_up=False)
    announce(context, "the groups of all pools are stopped", {"is_up": False})


@cluster.command()
@store_options
@click.argument("pool")
@click.argument("minimum", type=click.IntRange(1, 10_000), metavar="MIN")
@click.argument("maximum", type=click.IntRange(1, 10_000), metavar="[MAX]", required=False)
@pass_context
def scale(
    context: Context,
    home: Path | None,
    store: str | None,
    pool: str,
    minimum: int,
    maximum: int | None,
) -> None:
    """Set how many groups a pool has: always MIN, and up to MAX when work is queued."""
    largest = minimum if maximum is None else maximum
    if largest < minimum:
        raise InvalidInput(f"MAX is {largest}, which is less than MIN, {minimum}")
    with open_server_store(home, store) as database:
        names = [each.name for each in _require_report(database).pools]
        if pool not in names:
            raise InvalidInput(f"pool {pool!r} does not exist; there is {', '.join(names)}")
        _change_target(database, pools={pool: (minimum, largest)})
    data = {"pool": pool, "min": minimum, "max": largest}
    announce(context, f"pool {pool} has {minimum} to {largest} groups", data)


def _require_report(database: Database) -> ClusterReport:
    """Return the report of the controller; raises ConfigError if none runs."""
    from tinkex.store import clusters

    report = database.read(clusters.read_report)
    if report is None or report.at < clock.now() - CONTROLLER_SECONDS:
        raise ConfigError(
            "no server runs its workers on a cluster with this store",
            hint="Start one with `tinkex serve --cluster ray`.",
        )
    return report


def _change_target(
    database: Database,
    *,
    is_up: bool | None = None,
    pools: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> None:
    from tinkex.store import clusters

    def work(db: Connection) -> None:
        before = clusters.read_target(db)
        target = clusters.ClusterTarget(
            is_up=before.is_up if is_up is None else is_up, pools={**before.pools, **pools}
        )
        clusters.write_target(db, target)

    database.write(work)


def _shown_resources(resources: object) -> dict[str, float]:
    """Return the resources that pools ask for; memory is in GiB."""
    amounts = dict(resources) if isinstance(resources, Mapping) else {}
    return {
        name: amount / 2**30 if name == "memory" else amount for name, amount in amounts.items()
    }


def _list_groups(db: Connection) -> list[tuple[GroupRecord, int]]:
    from tinkex.store import groups

    return [(group, groups.count_runs_of(db, group.id)) for group in groups.list_current(db)]


def _read_report(db: Connection) -> ClusterReport | None:
    from tinkex.store import clusters

    return clusters.read_report(db)


def _is_up(db: Connection) -> bool:
    from tinkex.store import clusters

    return clusters.read_target(db).is_up


def _is_on_ray(row: Mapping[str, Any]) -> bool:
    from tinkex.server.pools import pool_of_group

    return pool_of_group(row["group"]) is not None


def _stopped_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a group that `tinkex cluster down` has stopped; it keeps its models."""
    return {**row, "state": "stopped", "busy": 0.0}


def _starting_row(started: GroupReport) -> dict[str, Any]:
    """Return the row of a group whose worker has not registered yet."""
    state = "waiting" if not started.node else "starting"
    return {
        **dict.fromkeys(("host", "seen"), ""),
        "group": started.id,
        "state": "failed" if started.error else state,
        "pool": started.pool,
        "node": started.node,
        "pid": started.pid,
        "models": 0,
        "queued_seconds": 0.0,
        "busy": 0.0,
        "base_models": [],
        "error": started.error,
    }


def _group_row(group: GroupRecord, num_models: int, started: GroupReport | None) -> dict[str, Any]:
    return {
        "group": group.id or DEFAULT_GROUP,
        "state": _describe_state(group),
        "host": group.host,
        "pool": started.pool if started is not None else "",
        "node": started.node if started is not None else "",
        "pid": started.pid if started is not None else 0,
        "models": num_models,
        "queued_seconds": round(group.load.get("queued_seconds", 0.0), 1),
        "busy": group.load.get("busy", 0.0),
        "base_models": _model_names(group),
        "seen": _iso_time(group.seen_at),
        "error": started.error if started is not None else "",
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
