"""Messages between the leader and the followers of a worker, as MessagePack.

Not pickled: decoding a message cannot run code. Arrays are the bytes of their elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from tinkex.engine.config import EngineConfig
from tinkex.engine.examples import TrainingExample
from tinkex.engine.gradient_shards import ShardBatch
from tinkex.engine.losses import LossValue
from tinkex.engine.micro_batches import ExampleRef
from tinkex.engine.protocol import AdapterSpec
from tinkex.engine.shard_run import PassResult, PassWork, RankPlan
from tinkex.types import ForwardBackwardInput


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class ExampleMessage(msgspec.Struct, frozen=True, array_like=True):
    """A training example; the token position of each target follows from the shape."""

    tokens: bytes
    targets: bytes
    shape: tuple[int, ...]
    inputs: dict[str, bytes]
    input_shapes: dict[str, tuple[int, ...]] = {}
    """Of the inputs of an uploaded loss that are not vectors."""

    @classmethod
    def pack(cls, example: TrainingExample) -> ExampleMessage:
        """Encode an example."""
        inputs = {name: value.tobytes() for name, value in example.inputs.items()}
        shapes = {name: value.shape for name, value in example.inputs.items() if value.ndim != 1}
        return cls(
            example.tokens.tobytes(), example.targets.tobytes(), example.shape, inputs, shapes
        )

    def unpack(self) -> TrainingExample:
        """Decode the example."""
        tokens = np.frombuffer(self.tokens, np.int64)
        rows = np.arange(len(tokens))
        return TrainingExample(
            tokens=tokens,
            targets=np.frombuffer(self.targets, np.int64),
            rows=rows if len(self.shape) == 1 else np.repeat(rows, self.shape[1]),
            shape=self.shape,
            inputs={
                name: np.frombuffer(value, np.float64).reshape(self.input_shapes.get(name, -1))
                for name, value in self.inputs.items()
            },
        )


class PassMessage(msgspec.Struct, frozen=True, array_like=True):
    """A pass with the examples of a rank's shards."""

    adapter_id: str
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None
    is_forward_only: bool
    examples: dict[int, ExampleMessage]

    @classmethod
    def pack(cls, work: PassWork, indices: Sequence[int]) -> PassMessage:
        """Encode a pass with some of its examples."""
        config = work.request.loss_fn_config
        return cls(
            work.adapter_id,
            work.request.loss_fn,
            None if config is None else dict(config),
            work.is_forward_only,
            {index: ExampleMessage.pack(work.examples[index]) for index in indices},
        )

    def request(self) -> ForwardBackwardInput:
        """The loss of the pass; the examples are decoded already."""
        return ForwardBackwardInput(
            data=[],
            loss_fn=self.loss_fn,  # type: ignore[arg-type]
            loss_fn_config=self.loss_fn_config,
        )


class PlanMessage(msgspec.Struct, frozen=True, array_like=True):
    """The plan of a rank."""

    first_shard: int
    last_shard: int
    batches: dict[int, tuple[int, list[tuple[int, int]], int]]
    max_tokens_at_once: int

    @classmethod
    def pack(cls, plan: RankPlan) -> PlanMessage:
        """Encode a plan."""
        batches = {
            number: (batch.shard, [(*ref,) for ref in batch.refs], batch.num_tokens)
            for number, batch in plan.batches.items()
        }
        return cls(plan.shards.start, plan.shards.stop, batches, plan.max_tokens_at_once)

    def unpack(self) -> RankPlan:
        """Decode the plan."""
        batches = {
            number: ShardBatch(shard, tuple(ExampleRef(*ref) for ref in refs), num_tokens)
            for number, (shard, refs, num_tokens) in self.batches.items()
        }
        return RankPlan(
            shards=range(self.first_shard, self.last_shard),
            batches=batches,
            max_tokens_at_once=self.max_tokens_at_once,
        )


# --- from the leader ----------------------------------------------------------------------------
class Ping(_Message, frozen=True, kw_only=True):
    """Tells followers that the leader lives; they do nothing."""


class ReplaceModels(_Message, frozen=True, kw_only=True):
    """Serve these base models from now on."""

    sources: dict[str, str]
    in_use: list[str]


class PutAdapter(_Message, frozen=True, kw_only=True):
    """The weights of an adapter have changed; a broadcast of them follows."""

    adapter_id: str
    spec: AdapterSpec
    numel: int


class DropAdapter(_Message, frozen=True, kw_only=True):
    """Remove an adapter from memory."""

    adapter_id: str


class StartRun(_Message, frozen=True, kw_only=True):
    """Begin the follower's part of some passes."""

    run_id: int
    base_model: str
    passes: list[PassMessage]
    plan: PlanMessage


class StepRun(_Message, frozen=True, kw_only=True):
    """Compute the next micro-batch of a run."""

    run_id: int


class FinishRun(_Message, frozen=True, kw_only=True):
    """Reply with the results of a run."""

    run_id: int


class SumGradients(_Message, frozen=True, kw_only=True):
    """Add up the gradients of all ranks, pass by pass; ends the run."""

    run_id: int
    is_present: list[list[bool]]
    """For each pass, which ranks have a gradient."""


class DiscardRun(_Message, frozen=True, kw_only=True):
    """Drop a run without a result."""

    run_id: int


class TakePart(_Message, frozen=True, kw_only=True):
    """Run a forward pass of a sharded base model, because the leader runs one."""

    base_model: str


class Stop(_Message, frozen=True, kw_only=True):
    """End the follower."""


LeaderMessage: TypeAlias = (
    Ping
    | ReplaceModels
    | PutAdapter
    | DropAdapter
    | StartRun
    | StepRun
    | FinishRun
    | SumGradients
    | DiscardRun
    | TakePart
    | Stop
)


# --- from a follower ----------------------------------------------------------------------------
class PassReply(msgspec.Struct, frozen=True, array_like=True):
    """A follower's results of one pass."""

    logprobs: dict[int, bytes]
    losses: dict[int, tuple[float, dict[str, float], int, str]]
    has_gradient: bool

    @classmethod
    def pack(cls, result: PassResult) -> PassReply:
        """Encode results without the gradient."""
        logprobs = {
            index: value.astype(np.float32, copy=False).tobytes()
            for index, value in result.logprobs.items()
        }
        losses = {
            number: (loss.value, dict(loss.metrics), loss.num_counted, loss.error)
            for number, loss in result.losses.items()
        }
        return cls(logprobs, losses, result.gradient is not None)

    def unpack(self) -> PassResult:
        """Decode the results."""
        return PassResult(
            {index: np.frombuffer(value, np.float32) for index, value in self.logprobs.items()},
            {
                number: LossValue(value, np.empty(0), metrics, num_counted, error)
                for number, (value, metrics, num_counted, error) in self.losses.items()
            },
        )


class RunReply(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's results of a run, or why it failed."""

    passes: list[PassReply] = msgspec.field(default_factory=list)
    error: str = ""
    is_out_of_memory: bool = False


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader tells followers before they join."""

    version: str
    """The leader's versions of tinkex and torch, which followers must have too."""
    num_ranks: int
    sources: Mapping[str, str]
    config: EngineConfig


_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[LeaderMessage] = msgspec.msgpack.Decoder(LeaderMessage)
_REPLIES = msgspec.msgpack.Decoder(RunReply)


def encode(message: LeaderMessage | RunReply) -> bytes:
    """Encode a message."""
    return _ENCODER.encode(message)


def decode_message(data: bytes) -> LeaderMessage:
    """Decode a message of the leader."""
    return _MESSAGES.decode(data)


def decode_reply(data: bytes) -> RunReply:
    """Decode a follower's reply."""
    return _REPLIES.decode(data)
