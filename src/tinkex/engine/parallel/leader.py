"""The leader's view of its followers: sends them their part of every pass, and adds it up.

Followers keep no state that the leader has not: they hold base models and copies of the weights of
adapters. Messages to a follower are executed in their order. The leader waits only for results.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tinkex.engine.adapters import AdapterState
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.loading import compute_device
from tinkex.engine.parallel import rendezvous
from tinkex.engine.parallel.follower_processes import FollowerProcesses
from tinkex.engine.parallel.messages import (
    DiscardRun,
    DropAdapter,
    FinishRun,
    LeaderMessage,
    PassMessage,
    Ping,
    PlanMessage,
    PutAdapter,
    RankSetup,
    ReplaceModels,
    RunReply,
    StartRun,
    StepRun,
    Stop,
    SumGradients,
    TakePart,
    decode_reply,
    encode,
)
from tinkex.engine.parallel.sharding import make_host
from tinkex.engine.protocol import EngineLost
from tinkex.engine.shard_run import PassResult, PassWork, RankPlan
from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.nn.ranks import DistributedContext

if TYPE_CHECKING:
    from tinkex.engine.models.loading import HostModel

LOG = get_logger(__name__)
#: How long to wait for the exit code of a follower whose connection has closed.
_EXIT_SECONDS = 1.0


def open_followers(sources: Mapping[str, str], config: EngineConfig) -> FollowerGroup:
    """Start the followers, or wait for those started elsewhere if there is a rendezvous."""
    address = rendezvous.parse_address(config.rendezvous) if config.rendezvous else None
    store, bound = rendezvous.open_store(address)
    rendezvous.publish_setup(
        store,
        RankSetup(
            version=rendezvous.versions(),
            num_ranks=config.ranks,
            sources=dict(sources),
            config=config,
        ),
    )
    processes = FollowerProcesses([])
    if address is None:
        processes = FollowerProcesses.start(bound, config.ranks)
    else:
        LOG.info("waiting for %d ranks at %s", config.ranks - 1, bound)
    try:
        rendezvous.wait_for_followers(store, config.ranks, processes.check)
        device = compute_device(rendezvous.rank_config(config, 0))
        ranks = rendezvous.join(store, 0, config.ranks, bound, device)
    except BaseException as error:  # whatever failed, no process may be left behind
        processes.kill()
        if isinstance(error, RuntimeError):
            raise ConfigError(f"the {config.ranks} ranks cannot connect: {error}") from error
        raise
    return FollowerGroup(ranks, processes, shard_device=device if config.shard_base else None)


class FollowerGroup:
    """The followers of this process."""

    def __init__(
        self,
        ranks: DistributedContext,
        processes: FollowerProcesses,
        *,
        shard_device: torch.device | None = None,
    ) -> None:
        self._ranks = ranks
        self.host: HostModel | None = None
        """Hosts base models on all ranks, if they are sharded."""
        if shard_device is not None:
            self.host = make_host(ranks, shard_device, self._announce, self.fail)
        self._processes = processes
        # The heartbeat is sent by another thread.
        self._lock = threading.RLock()
        self._lost: EngineLost | None = None
        self._run_ids = itertools.count()
        self._sent: dict[str, tuple[AdapterState, int]] = {}
        """The state and step of each adapter whose weights the followers have."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks, with this one."""
        return self._ranks.world_size

    def start_run(
        self, base_model: str, passes: Sequence[PassWork], plans: Sequence[RankPlan]
    ) -> LeaderRun:
        """Begin an attempt to run passes; `plans` has the plan of each rank."""
        run_id = next(self._run_ids)
        is_shared = self.is_sharded or any(plan.batches for plan in plans[1:])
        members = range(1, self.num_ranks) if is_shared else range(0)
        for work in passes if members else ():
            self._send_weights(work)
        for rank in members:
            needed: list[list[int]] = [[] for _ in passes]
            for batch in plans[rank].batches.values():
                for ref in batch.refs:
                    needed[ref.pass_index].append(ref.example_index)
            message = StartRun(
                run_id=run_id,
                base_model=base_model,
                passes=list(map(PassMessage.pack, passes, needed)),
                plan=PlanMessage.pack(plans[rank]),
            )
            with self.exchange():
                self._ranks.send_bytes(encode(message), rank)
        return LeaderRun(self, run_id, members, passes)

    def _send_weights(self, work: PassWork) -> None:
        """Send an adapter's weights to all followers, unless they have them."""
        state = work.adapter.state
        sent = self._sent.get(work.adapter_id)
        # An optimizer step counts, and everything else that changes weights replaces the state.
        if sent is not None and sent[0] is state and sent[1] == state.num_steps:
            return
        message = PutAdapter(
            adapter_id=work.adapter_id, spec=work.adapter.spec, numel=state.weights.numel()
        )
        with self.exchange():
            self.send(message, range(1, self.num_ranks))
            self._ranks.broadcast_weights([state.weights])
        self._sent[work.adapter_id] = (state, state.num_steps)

    def replace_models(self, sources: Mapping[str, str], in_use: Collection[str]) -> None:
        """Serve these base models from now on."""
        message = ReplaceModels(sources=dict(sources), in_use=sorted(in_use))
        self.send(message, range(1, self.num_ranks))

    def drop(self, adapter_id: str) -> None:
        """Remove an adapter's weights from the followers."""
        if self._sent.pop(adapter_id, None) is not None:
            self.send(DropAdapter(adapter_id=adapter_id), range(1, self.num_ranks))

    def ping(self) -> None:
        """Raise EngineLost if a follower has died; may be called from another thread."""
        self.send(Ping(), range(1, self.num_ranks))

    def check(self) -> None:
        """Raise EngineLost if a follower is known to be lost."""
        if self._lost is not None:
            raise self._lost

    @property
    def is_sharded(self) -> bool:
        """Whether base models are divided among the ranks, so that all passes are collective."""
        return self.host is not None

    def fail(self, error: Exception) -> None:
        """Give up after a failure in a collective pass: the ranks no longer agree on the next."""
        if self._lost is None:
            self._lost = EngineLost(
                f"a pass on a sharded base model failed, so all ranks restart: "
                f"{type(error).__name__}: {error}"
            )

    def _announce(self, base_model: str) -> None:
        self.send(TakePart(base_model=base_model), range(1, self.num_ranks))

    def close(self) -> None:
        """End all followers."""
        if self._lost is None:
            try:
                self.send(Stop(), range(1, self.num_ranks))
            except EngineLost as error:
                LOG.warning("%s", error.message)
        self._processes.stop(is_killed=self._lost is not None)
        dist.destroy_process_group()

    # --- exchange ------------------------------------------------------------------------------
    def send(self, message: LeaderMessage, members: range) -> None:
        """Send a message to some followers."""
        data = encode(message)
        with self.exchange():
            for rank in members:
                self._ranks.send_bytes(data, rank)

    def receive(self, rank: int) -> RunReply:
        """Wait for a follower's reply."""
        with self.exchange():
            return decode_reply(self._ranks.receive_bytes(rank))

    def tree_sum(
        self, value: Tensor | None, is_present: Sequence[bool], like: Tensor
    ) -> Tensor | None:
        """Add the gradients of all ranks."""
        with self.exchange():
            return self._ranks.tree_sum(value, is_present, like)

    @property
    def is_lost(self) -> bool:
        """Whether a follower has died."""
        return self._lost is not None

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Allow one thread to communicate; raises EngineLost when a follower has died."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except RuntimeError as error:
                reason = (
                    self._processes.describe_exit(_EXIT_SECONDS) or str(error).partition("\n")[0]
                )
                self._lost = EngineLost(f"a rank of this worker is lost: {reason}")
                raise self._lost from error


class LeaderRun:
    """An attempt to run passes, in the followers."""

    def __init__(
        self, group: FollowerGroup, run_id: int, members: range, passes: Sequence[PassWork]
    ) -> None:
        self._group = group
        self._run_id = run_id
        self._members = members
        self._passes = passes
        self._is_ended = False
        self._is_present: list[list[bool]] = []

    def step(self) -> None:
        """Let every follower compute its next micro-batch."""
        self._group.send(StepRun(run_id=self._run_id), self._members)

    def collect(self) -> Sequence[Sequence[PassResult]]:
        """Wait for all followers and return their results; raises if one failed."""
        self._group.send(FinishRun(run_id=self._run_id), self._members)
        replies = [self._group.receive(rank) for rank in self._members]
        for rank, reply in zip(self._members, replies, strict=True):
            if reply.error:
                kind = MemoryError if reply.is_out_of_memory else RuntimeError
                raise kind(f"rank {rank}: {reply.error}")
        self._is_present = [
            [False, *(reply.passes[index].has_gradient for reply in replies)]
            for index in range(len(self._passes))
        ]
        return [[one.unpack() for one in reply.passes] for reply in replies]

    def sum_gradients(self, own: Sequence[PassResult]) -> Sequence[Tensor | None]:
        """Add the gradients of all ranks in the order of the tree; ends the run."""
        if not self._members:
            return [result.gradient for result in own]
        self._is_ended = True
        for present, result in zip(self._is_present, own, strict=True):
            present[0] = result.gradient is not None
        message = SumGradients(run_id=self._run_id, is_present=self._is_present)
        with self._group.exchange():
            self._group.send(message, self._members)
            return [
                self._group.tree_sum(result.gradient, present, work.adapter.state.weights)
                for work, result, present in zip(self._passes, own, self._is_present, strict=True)
            ]

    def discard(self, error: BaseException) -> None:
        """Drop the run in all followers; does nothing after its end."""
        if self._group.is_sharded and isinstance(error, Exception):
            self._group.fail(error)
        if not self._is_ended and not self._group.is_lost:
            self._is_ended = True
            self._group.send(DiscardRun(run_id=self._run_id), self._members)
