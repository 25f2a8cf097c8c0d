"""The connection to Ray: a group is a placement group with one actor per rank.

The only module that imports ray. Ray places, starts, restarts and removes groups; no tensor and no
request travels through it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinkex.errors import ConfigError
from tinkex.logs import attach_logger, get_logger
from tinkex.server.cluster.hosted_follower import HostedFollower
from tinkex.server.cluster.hosted_worker import HostedWorker, WorkerStatus
from tinkex.server.cluster.views import ClusterNode, PlacedGroup
from tinkex.server.config_sources import decode_config
from tinkex.server.pools import PoolConfig
from tinkex.server.process.restart_policy import CONFIG_EXIT_CODE

#: Parts of the name of a placement group: prefix, store, group, version of the settings.
_PREFIX = "tinkex"
_SEPARATOR = "|"
_CALL_SECONDS = 5.0
#: How long to wait for a head, which may be restarting, and then for the connection.
_HEAD_SECONDS = 10.0
_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.5
_HINT = (
    "Start Ray here with `ray start --head`, or `ray start --address=HOST:PORT` to join a cluster, "
    "or pass --ray-address ray://HOST:10001."
)
LOG = get_logger(__name__)
_REMOVED = "REMOVED"


class GroupActor:
    """Runs the worker of a group, its rank 0, on the node where Ray has placed it."""

    def __init__(self, config: bytes, group_id: str) -> None:
        settings = decode_config(config)
        self._rendezvous = _free_address() if settings.ranks > 1 else ""
        on_node = replace(
            settings,
            rendezvous=self._rendezvous,
            stream_host=settings.stream_host or ray.util.get_node_ip_address(),
        )
        self._worker = HostedWorker(on_node, group_id)

    def rendezvous(self) -> str:
        """Return where the worker waits for its other ranks."""
        return self._rendezvous

    def status(self) -> WorkerStatus:
        """Return the state of the worker process."""
        return self._worker.status()

    def stop(self) -> None:
        """Stop the worker process; its group keeps its models."""
        self._worker.stop()


class FollowerActor:
    """Runs another rank of a group."""

    def __init__(self, config: bytes, group_id: str, rank: int) -> None:
        settings = decode_config(config)
        attach_logger(settings.log_level)
        self._follower = HostedFollower(rank, settings.threads, partial(_find_leader, group_id))


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"


def _find_leader(group_id: str) -> str:
    """Return the rendezvous of a group; empty if its leader does not run now."""
    try:
        return str(ray.get(ray.get_actor(group_id).rendezvous.remote(), timeout=_CONNECT_SECONDS))
    except (ValueError, RayError):
        return ""


class RayCluster:
    """The groups of one store on a Ray cluster."""

    def __init__(self, address: str, store_id: str) -> None:
        """Connect; raises ConfigError if there is no such cluster."""
        self._prefix = f"{_PREFIX}{_SEPARATOR}{store_id}{_SEPARATOR}"
        wait_for_head(address)
        # Ray waits for minutes for what answers but is not Ray.
        timer = threading.Timer(_CONNECT_SECONDS, _give_up, [address])
        timer.daemon = True
        timer.start()
        try:
            ray.init(
                address=address,
                namespace=f"{_PREFIX}-{store_id}",
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
        except Exception as error:
            raise describe_failure(address, str(error)) from error
        finally:
            timer.cancel()

    def list_nodes(self) -> list[ClusterNode]:
        """Return the nodes, also those that were lost."""
        return [
            ClusterNode(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["Alive"],
                {
                    name: amount
                    for name, amount in node["Resources"].items()
                    if not name.startswith(("node:", "object_store"))
                },
            )
            for node in ray.nodes()
        ]

    def list_groups(self) -> list[PlacedGroup]:
        """Return the groups of this store that were started and not removed."""
        found = []
        for row in ray.util.placement_group_table().values():
            if not row["name"].startswith(self._prefix) or row["state"] == _REMOVED:
                continue
            group_id, digest = row["name"].removeprefix(self._prefix).split(_SEPARATOR)
            nodes = tuple(row["bundles_to_node_id"].values())
            found.append(PlacedGroup(group_id, digest, row["state"] == "CREATED", nodes))
        return sorted(found)

    def start(self, group_id: str, digest: str, pool: PoolConfig, config: bytes) -> None:
        """Start a group, or what is missing of it."""
        name = f"{self._prefix}{group_id}{_SEPARATOR}{digest}"
        resources = dict(pool.resources)
        placement_group = self._find(name) or ray.util.placement_group(
            [resources] * pool.ranks, strategy="PACK", name=name, lifetime="detached"
        )
        options = {
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
        }
        for rank in range(pool.ranks):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index=rank
            )
            actor = ray.remote(FollowerActor if rank else GroupActor).options(
                name=f"{group_id}/{rank}" if rank else group_id,
                scheduling_strategy=strategy,
                **options,
            )
            actor.remote(config, group_id, *([rank] if rank else []))

    def statuses(self, group_ids: Sequence[str]) -> dict[str, WorkerStatus | None]:
        """Return the states of groups; None if a group does not respond, omitted if it is gone."""
        calls: dict[Any, str] = {}
        for group_id in group_ids:
            with contextlib.suppress(ValueError):
                calls[ray.get_actor(group_id).status.remote()] = group_id
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=_CALL_SECONDS)
        states: dict[str, WorkerStatus | None] = {calls[call]: None for call in late}
        for call in ready:
            try:
                states[calls[call]] = ray.get(call, timeout=_CALL_SECONDS)
            except (RayActorError, GetTimeoutError) as error:
                states[calls[call]] = _failed_status(str(error))
        return states

    def stop(self, group_id: str) -> None:
        """Ask the worker of a group to stop; it keeps its models."""
        with contextlib.suppress(ValueError, RayError):
            ray.get_actor(group_id).stop.remote()

    def remove(self, group: PlacedGroup) -> None:
        """End the processes of a group and free its resources."""
        with contextlib.suppress(ValueError, RayError):
            ray.kill(ray.get_actor(group.id))
        found = self._find(f"{self._prefix}{group.id}{_SEPARATOR}{group.digest}")
        if found is not None:
            ray.util.remove_placement_group(found)

    def _find(self, name: str) -> PlacementGroup | None:
        try:
            found: PlacementGroup = ray.util.get_placement_group(name)
        except ValueError:
            return None
        return found

    def close(self) -> None:
        """Disconnect; the groups stay."""
        ray.shutdown()


def _failed_status(reason: str) -> WorkerStatus | None:
    """Return the state of a group whose actor cannot be created; None if it only restarts."""
    if "creation task" not in reason:
        return None
    last_line = reason.strip().rpartition("\n")[2]
    return WorkerStatus(pid=0, num_restarts=0, has_ended=True, error=last_line, version="")


def wait_for_head(address: str) -> None:
    """Wait until a head answers; raises ConfigError if none does."""
    deadline = time.monotonic() + _HEAD_SECONDS
    while not _answers(address):
        if time.monotonic() > deadline:
            raise ConfigError(f"there is no Ray cluster at {address!r}", hint=_HINT)
        time.sleep(_POLL_SECONDS)


def _answers(address: str) -> bool:
    found: str | None = address.removeprefix("ray://")
    if found == address:
        try:
            # Also finds the cluster of `auto`.
            found = ray._private.services.canonicalize_bootstrap_address(address)
        except ValueError as error:
            raise ConfigError(f"ray_address is {address!r}; expected HOST:PORT or auto") from error
    host, _, port = (found or "").rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 65536:
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CALL_SECONDS).close()
    except OSError:
        return False
    return True


def _give_up(address: str) -> None:
    LOG.error("what answers at %r is not the head of a Ray cluster. %s", address, _HINT)
    os._exit(CONFIG_EXIT_CODE)


def describe_failure(address: str, reason: str) -> ConfigError:
    """Describe in a sentence why a cluster cannot be used."""
    if "ersion mismatch" in reason:
        versions = re.findall(r"(Ray|Python): ?([\w.]+)", reason)
        of_cluster = ", ".join(f"{name} {version}" for name, version in versions[:2])
        return ConfigError(
            f"the Ray cluster at {address!r} has other versions ({of_cluster}) than this machine "
            f"(Ray {ray.__version__}, Python {platform.python_version()})",
            hint="Install the same versions on all nodes.",
        )
    return ConfigError(f"this machine is not a node of the Ray cluster at {address!r}", hint=_HINT)
