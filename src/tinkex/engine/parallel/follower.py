"""A follower: computes its part of the passes of a leader, until the leader ends.

The leader starts its followers itself, unless it has a rendezvous; then start each of them with

    python -m tinkex.engine.parallel.follower --rank 1 --rendezvous HOST:PORT
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tinkex.engine.adapters import AdapterState, TrainableAdapter, build_layout
from tinkex.engine.config import EngineConfig
from tinkex.engine.models.loading import compute_device
from tinkex.engine.models.registry import ModelRegistry
from tinkex.engine.parallel import rendezvous
from tinkex.engine.parallel.messages import (
    DiscardRun,
    DropAdapter,
    FinishRun,
    LeaderMessage,
    PassReply,
    PutAdapter,
    ReplaceModels,
    RunReply,
    StartRun,
    StepRun,
    Stop,
    SumGradients,
    TakePart,
    decode_message,
    encode,
)
from tinkex.engine.parallel.sharding import make_host
from tinkex.engine.protocol import AdapterSpec
from tinkex.engine.shard_run import PassResult, PassWork, ShardRun
from tinkex.engine.trainer import is_out_of_memory
from tinkex.errors import TinkexError
from tinkex.logs import attach_logger, get_logger
from tinkex.nn.ranks import DistributedContext
from tinkex.system.processes import no_garbage_collection

LOG = get_logger(__name__)
_CONFIG_EXIT_CODE = 78


class _Run:
    """The follower's part of a run; the first error ends it, and is reported at the end."""

    def __init__(self) -> None:
        self.shard_run: ShardRun | None = None
        self.results: list[PassResult] = []
        self.reply = RunReply()

    def fail(self, error: Exception) -> None:
        self.shard_run = None
        reason = f"{type(error).__name__}: {error}"
        self.reply = RunReply(error=reason, is_out_of_memory=is_out_of_memory(error))
        if not self.reply.is_out_of_memory:
            LOG.error("a pass failed", exc_info=error)


class Follower:
    """Executes the messages of the leader."""

    def __init__(
        self, ranks: DistributedContext, sources: Mapping[str, str], config: EngineConfig
    ) -> None:
        self._ranks = ranks
        self._device = compute_device(config)
        self._is_sharded = config.shard_base
        host = None
        if config.shard_base:
            host = make_host(ranks, self._device, lambda _: None, lambda _: None)
        self._registry = ModelRegistry(sources, config, host=host)
        self._weights: dict[str, tuple[AdapterSpec, Tensor]] = {}
        self._runs: dict[int, _Run] = {}

    def serve(self) -> None:
        """Execute messages until the leader sends Stop."""
        while not isinstance(message := self._receive(), Stop):
            self._execute(message)

    def _receive(self) -> LeaderMessage:
        return decode_message(self._ranks.receive_bytes(0))

    def _execute(self, message: LeaderMessage) -> None:
        match message:
            case PutAdapter():
                weights = torch.empty(message.numel, device=self._device)
                self._ranks.broadcast_weights([weights])
                self._weights[message.adapter_id] = (message.spec, weights)
            case DropAdapter():
                self._weights.pop(message.adapter_id, None)
            case ReplaceModels():
                self._registry.replace_sources(message.sources, message.in_use)
            case StartRun():
                self._start(message)
            case StepRun():
                self._step(self._runs[message.run_id])
            case FinishRun():
                self._finish(self._runs[message.run_id])
            case SumGradients():
                self._sum_gradients(self._runs.pop(message.run_id), message.is_present)
            case DiscardRun():
                self._runs.pop(message.run_id, None)
            case TakePart():
                self._registry.get(message.base_model).hosted_model.take_part()

    # --- runs ----------------------------------------------------------------------------------
    def _start(self, message: StartRun) -> None:
        run = self._runs[message.run_id] = _Run()
        try:
            passes = [
                PassWork(
                    one.adapter_id,
                    self._make_adapter(one.adapter_id),
                    one.request(),
                    {index: example.unpack() for index, example in one.examples.items()},
                    one.is_forward_only,
                )
                for one in message.passes
            ]
            run.shard_run = ShardRun(
                passes,
                message.plan.unpack(),
                lambda: self._registry.get(message.base_model).hosted_model,
            )
        except Exception as error:  # noqa: BLE001 - reported at the end of the run
            self._fail(run, error)

    def _fail(self, run: _Run, error: Exception) -> None:
        """Record an error; in a collective pass, end this rank, for which the others wait."""
        if self._is_sharded:
            raise error
        run.fail(error)

    def _make_adapter(self, adapter_id: str) -> TrainableAdapter:
        spec, weights = self._weights[adapter_id]
        layout = build_layout(self._registry.get(spec.base_model).hosted_model, spec)
        return TrainableAdapter(spec, layout, AdapterState.from_weights(weights))

    def _step(self, run: _Run) -> None:
        try:
            if run.shard_run is not None:
                run.shard_run.step()
        except Exception as error:  # noqa: BLE001 - reported at the end of the run
            self._fail(run, error)

    def _finish(self, run: _Run) -> None:
        if run.shard_run is not None:
            run.results = run.shard_run.finish()
            run.reply = RunReply(passes=list(map(PassReply.pack, run.results)))
        self._ranks.send_bytes(encode(run.reply), 0)

    def _sum_gradients(self, run: _Run, is_present: Sequence[Sequence[bool]]) -> None:
        assert run.shard_run is not None
        for result, work, present in zip(
            run.results, run.shard_run.passes, is_present, strict=True
        ):
            self._ranks.tree_sum(result.gradient, present, work.adapter.state.weights)


# --- process --------------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> int:
    """Run a follower; returns the exit code."""
    options = _parse_arguments(argv)
    attach_logger(options.log_level)
    # The leader decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.exit_with_parent:
        threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    try:
        return _run(options)
    except TinkexError as error:
        LOG.error("%s%s", error.message, f". {error.hint}" if error.hint else "")
        return _CONFIG_EXIT_CODE


def _run(options: argparse.Namespace) -> int:
    address = rendezvous.parse_address(options.rendezvous)
    store, setup = rendezvous.read_setup(address, options.rank)
    config = setup.config
    if options.device is not None:
        config = replace(config, device=options.device)
    config = rendezvous.rank_config(config, options.local_rank)
    if options.threads or config.threads:
        torch.set_num_threads(options.threads or config.threads)
    with no_garbage_collection():
        device = compute_device(config)
        rendezvous.announce(store, options.rank)
        ranks = rendezvous.join(store, options.rank, setup.num_ranks, address, device)
        follower = Follower(ranks, setup.sources, config)
    LOG.debug("rank %d is ready", options.rank)
    try:
        follower.serve()
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        LOG.error("rank %d ends: %s: %s", options.rank, type(error).__name__, reason)
        return 1
    dist.destroy_process_group()
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tinkex.engine.parallel.follower", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rank", type=int, required=True, help="rank, from 1")
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="the leader")
    parser.add_argument("--local-rank", type=int, default=0, help="GPU of this machine to use")
    parser.add_argument("--device", help="compute device; the default is the leader's setting")
    parser.add_argument("--threads", type=int, default=0, help="compute threads")
    parser.add_argument("--log-level", default="info", help="log level")
    parser.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _exit_with_parent() -> None:
    """End this process when its standard input closes."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
