"""How the ranks of a worker find each other: the leader's key-value store on a TCP port.

The leader publishes its settings there; each follower checks that its versions match and announces
itself. Then all join one torch.distributed process group.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tinkex.engine.config import EngineConfig
from tinkex.engine.models.loading import compute_device
from tinkex.engine.parallel.messages import RankSetup
from tinkex.errors import ConfigError
from tinkex.nn.ranks import DistributedContext
from tinkex.settings import package_version

LOOPBACK = "127.0.0.1"
#: How long ranks wait for each other: at the start, and in every collective operation. The death of
#: a process is noticed at once; this is the limit for machines that are gone or blocked.
TIMEOUT = timedelta(minutes=10)
_POLL_SECONDS = 0.05


class Address(NamedTuple):
    """Where the leader waits for followers."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse HOST:PORT; raises ConfigError if it is something else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"rendezvous is {text!r}; expected HOST:PORT")
    return Address(host.strip("[]"), int(port))


def versions() -> str:
    """What all ranks must have in common, because results depend on it."""
    return f"tinkex {package_version()}, torch {torch.__version__}"


def rank_config(config: EngineConfig, local_rank: int) -> EngineConfig:
    """The settings of one of several ranks on a machine: each has its own GPU."""
    is_unnumbered = config.device in {"auto", "cuda"}
    if not is_unnumbered or compute_device(config).type != "cuda":
        return config
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}",
            hint="Use fewer ranks on this machine, or device = cpu.",
        )
    return replace(config, device=f"cuda:{local_rank}")


# --- leader -------------------------------------------------------------------------------------
def open_store(address: Address | None) -> tuple[TCPStore, Address]:
    """Listen for followers; without an address, on a free port of the loopback interface."""
    host, port = address or (LOOPBACK, 0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot wait for ranks at {Address(host, port)}: {error.strerror or error}",
            hint="Choose another rendezvous, an address of this machine with a free port.",
        ) from error
    bound = Address(host, listener.getsockname()[1])
    # The store would otherwise listen on all interfaces.
    store = TCPStore(
        host,
        bound.port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, bound


def publish_setup(store: TCPStore, setup: RankSetup) -> None:
    """Let followers read their settings."""
    store.set("setup", msgspec.json.encode(setup).decode())


def wait_for_followers(
    store: TCPStore, num_ranks: int, check: Callable[[], None], timeout: timedelta = TIMEOUT
) -> None:
    """Wait until all followers have announced themselves; `check` raises if one cannot."""
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(1, num_ranks):
        while not store.check([f"joined/{rank}"]):
            check()
            if store.check(["refused"]):
                raise ConfigError(store.get("refused").decode())
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"rank {rank} of {num_ranks} has not joined within "
                    f"{timeout.total_seconds():g} s",
                    hint="Start it with `python -m tinkex.engine.parallel.follower`.",
                )
            time.sleep(_POLL_SECONDS)


# --- follower -----------------------------------------------------------------------------------
def read_setup(address: Address, rank: int) -> tuple[TCPStore, RankSetup]:
    """Connect to the leader and read the settings; raises ConfigError if this rank cannot join."""
    try:
        store = TCPStore(address.host, address.port, is_master=False, timeout=TIMEOUT)
        setup = msgspec.json.decode(store.get("setup"), type=RankSetup)
    except (RuntimeError, msgspec.DecodeError) as error:
        raise ConfigError(f"rank {rank} cannot reach the leader at {address}") from error
    reason = ""
    if setup.version != versions():
        reason = f"rank {rank} has {versions()}, but the leader has {setup.version}"
    elif not 0 < rank < setup.num_ranks:
        reason = f"rank {rank} cannot join: the worker has ranks 1 to {setup.num_ranks - 1}"
    elif store.add(f"taken/{rank}", 1) > 1:
        reason = f"rank {rank} has joined twice"
    if reason:
        store.set("refused", reason)
        raise ConfigError(reason)
    return store, setup


def announce(store: TCPStore, rank: int) -> None:
    """Tell the leader that this rank is ready to join."""
    store.set(f"joined/{rank}", "")


# --- both ---------------------------------------------------------------------------------------
def join(
    store: TCPStore, rank: int, num_ranks: int, address: Address, device: torch.device
) -> DistributedContext:
    """Join the process group: gloo for messages and CPUs, NCCL for tensors on GPUs."""
    if address.host in {LOOPBACK, "localhost", "::1"}:
        # Gloo would otherwise listen on the interface of the host name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=num_ranks,
        timeout=TIMEOUT,
    )
    return DistributedContext(rank=rank, world_size=num_ranks)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
