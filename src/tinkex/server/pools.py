"""Pools of worker groups: what each group runs and needs, and how many there may be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from tinkex.errors import ConfigError

#: The settings `cluster` that start groups; empty starts workers on this machine only.
CLUSTERS = ("", "ray")
#: The pool of a server without `pools`.
DEFAULT_POOL = "default"
MAX_GROUPS = 10_000
_POOL_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?")
_NUM_RANKS = (1, 2, 4, 8)
#: Separates the pool from the rest of a group's id; host names cannot contain it.
_SEPARATOR = ":"


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups that serve the same base models with the same resources."""

    name: str
    """The name, which is the first part of the names of its groups."""
    models: tuple[str, ...] = ()
    """Base models that its groups serve, as NAME=PATH; empty: those of the server."""
    ranks: int = 1
    """Processes of a group that compute each pass together; each gets `resources`."""
    resources: Mapping[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1.0})
    """What Ray reserves per rank, such as CPU, GPU or a custom resource of some nodes."""
    min: int = 1
    """The number of groups without load."""
    max: int = 0
    """The largest number of groups; 0: as many as `min`."""

    def __post_init__(self) -> None:
        if not _POOL_NAME.fullmatch(self.name):
            raise ConfigError(
                f"pool name {self.name!r} is invalid; expected up to 40 lower-case letters, "
                "digits, dots and hyphens"
            )
        if self.ranks not in _NUM_RANKS:
            expected = ", ".join(map(str, _NUM_RANKS))
            raise ConfigError(f"pool {self.name!r}: ranks is {self.ranks}; expected {expected}")
        if not 1 <= self.min <= self.largest <= MAX_GROUPS:
            raise ConfigError(
                f"pool {self.name!r}: min is {self.min} and max is {self.max}; expected "
                f"1 <= min <= max <= {MAX_GROUPS}"
            )
        for name, amount in self.resources.items():
            if not 0 < amount < math.inf:
                raise ConfigError(
                    f"pool {self.name!r}: resource {name!r} is {amount}; expected more than 0"
                )

    @property
    def largest(self) -> int:
        """The largest number of groups."""
        return self.max or self.min


def check_pools(pools: tuple[PoolConfig, ...]) -> None:
    """Raise ConfigError if two pools have the same name."""
    names = [pool.name for pool in pools]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"two pools are called {repeated[0]!r}; choose different names")


def make_group_id(pool: str, suffix: str) -> str:
    """Return the id of a pool's group."""
    return f"{pool}{_SEPARATOR}{suffix}"


def pool_of_group(group_id: str) -> str | None:
    """Return the pool of a group; None for groups that Ray does not manage."""
    pool, separator, _ = group_id.partition(_SEPARATOR)
    return pool if separator else None
