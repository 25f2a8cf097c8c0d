"""Ranks of torch.distributed and their collective operations, for pipeline and engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tinkex.errors import TinkexError

ResultT = TypeVar("ResultT")
#: Gradients are all-reduced in buckets of about this many elements.
_BUCKET_NUMEL = 1 << 23
_TIMEOUT = timedelta(minutes=30)


class RankFailed(TinkexError):
    """Another rank failed, so this one stops too."""

    def __init__(self) -> None:
        super().__init__("another rank failed", hint="See the message of that rank.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedContext:
    """Rank of this process and world size."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_rank_zero(self) -> bool:
        """True for the rank that saves, evaluates and reports."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """True if there are no other ranks."""
        return self.world_size == 1

    def all_reduce_values(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over all ranks; every rank gets the sums."""
        if self.is_single_process:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=_collective_device())
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def all_reduce_gradients(self, params: Sequence[Tensor]) -> None:
        """Sum gradients over all ranks in place; missing gradients count as zero."""
        if self.is_single_process:
            return
        for bucket in _buckets(params):
            for param in bucket:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            flat = torch.cat([param.grad.reshape(-1) for param in bucket if param.grad is not None])
            dist.all_reduce(flat)
            parts = flat.split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                assert param.grad is not None
                param.grad.copy_(part.view_as(param))

    @torch.no_grad()
    def broadcast_weights(self, weights: Sequence[Tensor]) -> None:
        """Copy the weights of rank 0 to all ranks."""
        if not self.is_single_process:
            for weight in weights:
                dist.broadcast(weight, src=0)

    def all_gather(self, value: ResultT) -> list[ResultT]:
        """Return the values of all ranks in order."""
        if self.is_single_process:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: ResultT) -> ResultT:
        """Return the value of rank 0."""
        if self.is_single_process:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def run_on_rank_zero(self, compute: Callable[[], ResultT]) -> ResultT:
        """Run on rank 0 and return its result on all ranks; if it fails, all ranks raise."""
        if self.is_single_process:
            return compute()
        if not self.is_rank_zero:
            received: tuple[ResultT] | None = self.broadcast(None)
            if received is None:
                raise RankFailed
            return received[0]
        try:
            result = compute()
        except Exception:  # whatever failed, the other ranks must not wait for it
            self.broadcast(None)
            raise
        self.broadcast((result,))
        return result

    # --- between two ranks ---------------------------------------------------------------------
    def send_bytes(self, data: bytes, rank: int) -> None:
        """Send bytes to another rank."""
        dist.send(torch.tensor([len(data)]), rank)
        if data:
            # Only read from, so the buffer need not be writable.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                dist.send(torch.frombuffer(data, dtype=torch.uint8), rank)

    def receive_bytes(self, rank: int) -> bytes:
        """Receive the next bytes from another rank."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            dist.recv(data, rank)
        return data.numpy().tobytes()

    def tree_sum(
        self, value: Tensor | None, is_present: Sequence[bool], like: Tensor
    ) -> Tensor | None:
        """Add tensors of all ranks in a fixed binary tree; rank 0 gets the sum, others None.

        `is_present` tells which ranks have a value; a missing one counts as nothing. The number of
        ranks must be a power of two.
        """
        present, distance = list(is_present), 1
        while distance < self.world_size:
            if self.rank % (2 * distance) == distance:
                if value is not None:
                    dist.send(value, self.rank - distance)
                return None
            if present[self.rank + distance]:
                other = torch.empty_like(like)
                dist.recv(other, self.rank + distance)
                value = other if value is None else value.add_(other)
            for rank in range(0, self.world_size, 2 * distance):
                present[rank] = present[rank] or present[rank + distance]
            distance *= 2
        return value


def _buckets(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for param in params:
        if bucket and (size + param.numel() > _BUCKET_NUMEL or param.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += param.numel()
    if bucket:
        yield bucket


def _collective_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@contextmanager
def init_distributed() -> Iterator[DistributedContext]:
    """Join the process group if torchrun started this process; nested calls reuse it.

    The backend is nccl if every process has its own GPU, else gloo.
    """
    if dist.is_available() and dist.is_initialized():
        yield _current_context()
        return
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield DistributedContext()
        return
    dist.init_process_group(_backend(), timeout=_TIMEOUT)
    try:
        ranks = _current_context()
        if dist.get_backend() == "nccl":
            torch.cuda.set_device(ranks.local_rank)
        yield ranks
    finally:
        dist.destroy_process_group()


def _current_context() -> DistributedContext:
    return DistributedContext(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_node_local_rank(fallback_rank=0),
    )


def _backend() -> str:
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    return "nccl" if has_gpus and local_rank < torch.cuda.device_count() else "gloo"
