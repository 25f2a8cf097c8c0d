"""The cluster of a store: what its owner wants, and what its controller reports."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from tinkex.store import settings

_TARGET = "cluster_target"
_REPORT = "cluster_report"


class ClusterTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What `tinkex cluster up`, `down` and `scale` have requested."""

    is_up: bool = True
    """Whether groups run; otherwise all are stopped."""
    pools: Mapping[str, tuple[int, int]] = {}
    """Smallest and largest number of groups, for pools where it differs from the settings."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster."""

    id: str
    host: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]
    groups: tuple[str, ...] = ()


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the controller has started."""

    id: str
    pool: str
    node: str = ""
    """The id of the node of its leader; empty while it waits for resources."""
    pid: int = 0
    error: str = ""
    """Why its worker cannot run."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a pool."""

    name: str
    min: int
    max: int
    num_wanted: int


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cluster as its controller saw it last."""

    at: float
    """When the controller has written it."""
    address: str
    error: str = ""
    """Why the controller cannot work; empty if it can."""
    nodes: tuple[NodeReport, ...] = ()
    groups: tuple[GroupReport, ...] = ()
    pools: tuple[PoolReport, ...] = ()


def read_target(db: sa.Connection) -> ClusterTarget:
    """Return what the owner of the store wants."""
    value = settings.get(db, _TARGET)
    return ClusterTarget() if value is None else msgspec.convert(value, ClusterTarget)


def write_target(db: sa.Connection, target: ClusterTarget) -> None:
    """Store what the owner of the store wants."""
    settings.put(db, _TARGET, msgspec.to_builtins(target))


def read_report(db: sa.Connection) -> ClusterReport | None:
    """Return the last report; None if the store has never had a cluster."""
    value = settings.get(db, _REPORT)
    return None if value is None else msgspec.convert(value, ClusterReport)


def write_report(db: sa.Connection, report: ClusterReport) -> None:
    """Store a report."""
    settings.put(db, _REPORT, msgspec.to_builtins(report))
