"""Groups and nodes as a cluster lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PlacedGroup(NamedTuple):
    """A group for which the cluster has reserved resources, or will."""

    id: str
    digest: str
    """Identifies the settings that it was started with."""
    is_placed: bool
    """Whether its resources are reserved; otherwise they are not available now."""
    node_ids: tuple[str, ...]
    """The nodes of its ranks."""


class ClusterNode(NamedTuple):
    """A node of the cluster."""

    id: str
    host: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]
