"""Several ranks train with the same bits as one, and lose nothing when one of them fails."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine_calls import datum, forward_backward, spec, step, weights, work
from tests.support.ports import free_port
from tinkex.client.loss_graph import encode_graph, trace_loss
from tinkex.engine.config import EngineConfig
from tinkex.engine.custom_losses.graphs import make_loss_id
from tinkex.engine.parallel.leader import open_followers
from tinkex.engine.parallel.messages import RunReply
from tinkex.engine.protocol import EngineLost, Pass, SamplerSource
from tinkex.engine.torch_engine import TorchEngine
from tinkex.nn.sharded_model import ShardedModel
from tinkex.types import (
    ForwardBackwardOutput,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)

NAME = "tiny"
LENGTHS = (5, 12, 12, 30, 7, 40, 21, 9, 33, 16, 28)


@contextmanager
def open_engine(folder: Path, ranks: int, **settings: Any) -> Iterator[TorchEngine]:
    sources = {NAME: str(folder)}
    config = EngineConfig(ranks=ranks, threads=1, step_tokens=64, **settings)
    followers = open_followers(sources, config) if ranks > 1 else None
    engine = TorchEngine(sources, config, followers)
    try:
        yield engine
    finally:
        engine.close()


def batch(number: int, **inputs: Any) -> list:
    return [datum(100 * number + index, length, **inputs) for index, length in enumerate(LENGTHS)]


def rl_batch(number: int) -> list:
    rng = np.random.default_rng(number)
    return [
        datum(
            number * 100 + index,
            length,
            logprobs=rng.normal(-6, 0.2, length).astype(np.float32),
            advantages=rng.normal(0, 1, length).astype(np.float32),
        )
        for index, length in enumerate(LENGTHS)
    ]


def upload_loss() -> str:
    def squares(logprobs, weights, scale):
        loss = (logprobs**2 * weights).sum() * scale
        return loss, {"custom/squares:sum": loss, "custom/low:mean": logprobs.min()}

    traced = trace_loss(squares, {"logprobs": 1, "weights": 1, "scale": 0})
    return make_loss_id(traced.inputs, encode_graph(traced.graph))


class Record:
    """Everything that clients see, bit by bit."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def add(self, name: str, outcome: object) -> None:
        assert isinstance(outcome, ForwardBackwardOutput), outcome
        logprobs = [one["logprobs"].to_numpy().tobytes() for one in outcome.loss_fn_outputs]
        self.values[name] = (logprobs, outcome.metrics)


def run_passes(engine: TorchEngine, *passes: Pass) -> list:
    return list(engine.run_passes(passes))


def train(engine: TorchEngine, record: Record, directory: Path) -> None:
    """Several steps with every kind of loss; two batches are accumulated in each step."""
    engine.create("a", spec(gradient_shards=8))
    engine.create("b", spec(seed=2, gradient_shards=8))
    losses = ("cross_entropy", "importance_sampling", "ppo", "stable_reinforce")
    for number, loss in enumerate(losses):
        data = batch(number) if loss == "cross_entropy" else rl_batch(number)
        for one in data if loss != "cross_entropy" else ():
            one.loss_fn_inputs.pop("weights")
        both = [Pass(adapter_id=name, request=work(*data, loss=loss)) for name in ("a", "b")]
        # Passes of two adapters share micro-batches.
        for name, outcome in zip(("a", "b"), run_passes(engine, *both), strict=True):
            record.add(f"{loss} {name}", outcome)
        record.add(f"more {number}", forward_backward(engine, "a", *batch(10 + number)[:3]))
        record.add(
            f"forward {number}", forward_backward(engine, "a", *batch(20), forward_only=True)
        )
        record.values[f"step {number}"] = step(engine, "a"), step(engine, "b", 1e-3)
    engine.create("d", spec(gradient_shards=8, optimizer={"type": "dimuon"}))
    for number in range(2):
        record.add(f"dimuon {number}", forward_backward(engine, "d", *batch(number)))
        step(engine, "d")
    record.values["dimuon"] = weights(engine, "d").numpy().tobytes()
    data = [
        replace(one, loss_fn_inputs={**one.loss_fn_inputs, "scale": np.array(2.0, np.float32)})
        for one in batch(5)
    ]
    custom = work(*data, loss="custom", loss_id=upload_loss())
    record.add("custom", *run_passes(engine, Pass(adapter_id="d", request=custom)))
    record.values["custom"] = step(engine, "d")
    record.values["one example"] = forward_backward(engine, "a", datum(1, 200)).metrics
    for name in ("snapshot", "checkpoint"):
        (directory / name).mkdir()
    engine.snapshot("a")(directory / "snapshot")
    engine.save("a", directory / "checkpoint", with_optimizer=True)
    engine.load("b", directory / "checkpoint", with_optimizer=True)
    engine.restore("c", spec(gradient_shards=8), directory / "snapshot")
    record.add("after load", forward_backward(engine, "b", *batch(30)))
    record.add("after restore", forward_backward(engine, "c", *batch(30)))
    for name in ("a", "b", "c"):
        record.values[f"last step {name}"] = step(engine, name)
        record.values[f"weights {name}"] = weights(engine, name).numpy().tobytes()
    files = sorted((directory / "checkpoint").iterdir())
    record.values["files"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def interleave(engine: TorchEngine, record: Record) -> None:
    """A long pass is suspended while a sample and passes of other adapters run."""
    long = engine.start_passes([Pass(adapter_id="a", request=work(*batch(40), *batch(41)))])
    dropped = engine.start_passes([Pass(adapter_id="b", request=work(*batch(42)))])
    assert long.step() is None
    assert dropped.step() is None
    request = SampleRequest(
        prompt=ModelInput.from_ints([5, 6, 7]),
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=5, seed=1),
    )
    engine.start_sample("s", SamplerSource(base_model=NAME), request)
    dropped.cancel()
    record.add("between", forward_backward(engine, "c", *batch(43)))
    while (outcomes := long.step()) is None:
        engine.step_samples()
    record.add("long", outcomes[0])
    # The cancelled pass has no effect.
    record.values["unchanged"] = step(engine, "b")
    record.values["last"] = step(engine, "a")
    record.values["after"] = weights(engine, "a").numpy().tobytes()


def run_all(folder: Path, ranks: int, directory: Path, **settings: Any) -> dict[str, object]:
    directory.mkdir()
    record = Record()
    with open_engine(folder, ranks, **settings) as engine:
        train(engine, record, directory)
        interleave(engine, record)
    return record.values


@pytest.fixture(scope="module")
def one_rank(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run_all(folder, 1, tmp_path_factory.mktemp("ranks") / "one")


def assert_same(values: dict[str, object], expected: dict[str, object]) -> None:
    different = [name for name in expected if values[name] != expected[name]]
    assert not different


def test_two_ranks_train_with_the_bits_of_one(
    folder: Path,
    tmp_path: Path,
    one_rank: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record()
    with open_engine(folder, 2) as engine:
        train(engine, record, tmp_path)
        interleave(engine, record)
        assert_same(record.values, one_rank)
        _check_failed_pass(engine, monkeypatch)
        _check_killed_follower(engine)


def _check_failed_pass(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a follower has too little memory, all ranks retry with smaller micro-batches."""
    assert engine._followers is not None
    replies = [RunReply(error="MemoryError: ", is_out_of_memory=True)]
    receive = engine._followers.receive

    def receive_failure(rank: int) -> RunReply:
        reply = receive(rank)
        return replies.pop() if replies else reply

    monkeypatch.setattr(engine._followers, "receive", receive_failure)
    forward_backward(engine, "a", *batch(1))
    assert not replies
    metrics = step(engine, "a", 0.0)
    monkeypatch.undo()
    forward_backward(engine, "a", *batch(1))
    assert step(engine, "a", 0.0)["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


def _check_killed_follower(engine: TorchEngine) -> None:
    """A pass ends with one sentence, and the engine refuses further passes."""
    assert engine._followers is not None
    (process,) = engine._followers._processes._processes
    run = engine.start_passes([Pass(adapter_id="a", request=work(*batch(1), *batch(2)))])
    assert run.step() is None
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    with pytest.raises(EngineLost, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
        while run.step() is None:
            pass
    with pytest.raises(EngineLost):
        engine._followers.ping()
    # What the leader has is complete.
    assert engine.snapshot("a") is not None


@pytest.mark.slow
def test_four_ranks_train_with_the_bits_of_one(
    folder: Path, tmp_path: Path, one_rank: dict[str, object]
) -> None:
    assert_same(run_all(folder, 4, tmp_path / "four"), one_rank)


def sample(engine: TorchEngine, directory: Path | None = None) -> list[int]:
    request = SampleRequest(
        prompt=ModelInput.from_ints([5, 6, 7]),
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=8, temperature=0.0),
    )
    engine.start_sample("s", SamplerSource(base_model=NAME, directory=directory), request)
    while engine.num_samples:
        for finished in engine.step_samples():
            assert isinstance(finished.outcome, SampleResponse), finished.outcome
            return list(finished.outcome.sequences[0].tokens)
    raise AssertionError("no sample has finished")


def train_gradient(engine: TorchEngine, shards: int) -> torch.Tensor:
    """The gradient of uneven work, in which some ranks have nothing to do."""
    engine.create("a", spec(gradient_shards=shards))
    step(engine, "a")
    forward_backward(engine, "a", *batch(1))
    step(engine, "a")
    forward_backward(engine, "a", *batch(2))
    forward_backward(engine, "a", datum(1, 100))
    forward_backward(engine, "a", *batch(3), forward_only=True)
    gradient = engine._adapters["a"].state.gradient
    assert gradient is not None
    return gradient.clone()


def test_sharded_base_model_has_the_gradients_of_one_process(folder: Path) -> None:
    with open_engine(folder, 1) as engine:
        expected = [train_gradient(engine, shards) for shards in (1, 8)]
        tokens = sample(engine)
    # Started by hand, before the leader.
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tinkex.engine.parallel.follower", "--rank", "1"]
    with (
        subprocess.Popen([*command, "--rendezvous", address, "--threads", "1"]) as follower,
        open_engine(folder, 2, shard_base=True, rendezvous=address) as engine,
    ):
        for shards, one in zip((1, 8), expected, strict=True):
            gradient = train_gradient(engine, shards)
            assert ((gradient - one).norm() / one.norm()).item() <= 1e-6
        hosted_model = engine._registry.get(NAME).hosted_model
        assert isinstance(hosted_model, ShardedModel)
        assert hosted_model.local_fraction() == 0.5
        assert sample(engine) == tokens
        # Between two micro-batches of a pass.
        run = engine.start_passes([Pass(adapter_id="a", request=work(*batch(1), *batch(2)))])
        assert run.step() is None
        assert sample(engine) == tokens
        run.cancel()
        _check_failure_of_sharded_model(engine)
        # It would end with this process.
        follower.kill()


def _check_failure_of_sharded_model(engine: TorchEngine) -> None:
    """After a failure in a collective pass, the engine refuses to continue."""
    hosted_model = engine._registry.get(NAME).hosted_model
    hosted_model._decoder.forward = None
    with pytest.raises(EngineLost, match="a pass on a sharded base model failed"):
        engine.run_passes([Pass(adapter_id="a", request=work(*batch(1)))])
    with pytest.raises(EngineLost):
        sample(engine)
