"""Uploaded losses have the values and gradients of torch; invalid and hostile ones are refused."""

from __future__ import annotations

import base64
import json
import math
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.integration.engine.conftest import MakeEngine
from tests.support.engine_calls import datum, forward_backward, spec, step, weights, work
from tinkex.client.loss_graph import encode_graph, trace_loss
from tinkex.engine.custom_losses import graphs
from tinkex.engine.custom_losses.graphs import find_loss, make_loss_id
from tinkex.engine.protocol import EngineFailure, Pass
from tinkex.engine.torch_engine import TorchEngine
from tinkex.errors import InvalidInput
from tinkex.types import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossNode,
    ForwardBackwardOutput,
    TensorData,
)

Loss = Callable[..., Any]


def upload(fn: Loss, **ranks: int) -> str:
    traced = trace_loss(fn, {"logprobs": 1, **ranks})  # type: ignore[dict-item]
    return make_loss_id(traced.inputs, encode_graph(traced.graph))


# --- equality with torch -------------------------------------------------------------------------


def ppo(logprobs, old, weights):
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - 0.2, 1 + 0.2)
    loss = -torch.minimum(ratio * weights, clipped * weights).sum()
    clip_fraction = (ratio != clipped).float().mean()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clipped:sum": clip_fraction}


def elementwise(logprobs, old, weights):
    x, y = logprobs, old
    total = torch.expm1(x) + torch.log1p(-x) + x.sigmoid() + x.tanh() + torch.sin(x) * x.cos()
    total = total + F.logsigmoid(x) + F.softplus(x, beta=2) + F.silu(x) + torch.relu(x + 1)
    total = total + (-x).sqrt() + (-x).rsqrt() + x.square() + x.reciprocal() + x.abs()
    total = total + (-x) ** weights.abs() + 2**x + x**3 + torch.logaddexp(x, y)
    total = total + torch.special.xlogy(weights.abs(), -x) + torch.maximum(x, y) + x.exp2()
    total = total + torch.where((x > y) & ~(x < -2), x * y, x / y) + x.masked_fill(y > -1, 0.5)
    total = total + torch.clamp(x, max=-0.5) + x.clamp(min=y) + torch.log2(-x) + (1 - x) - (-x)
    total = (
        total + x.floor() + x.round() + x.sign() + x.detach() // y + x % 0.3 + torch.nan_to_num(x)
    )
    return total.sum(), {}


def reduces(logprobs, old, weights):
    rows = torch.stack([logprobs, old, weights]).t()
    total = rows.logsumexp(dim=-1).sum() + rows.softmax(-1)[:, 0].sum() + rows.amax(dim=1).mean()
    total = total + F.log_softmax(rows, dim=1).min() + rows.max(dim=1)[0].sum() + rows.std()
    total = total + rows.var(dim=0, unbiased=False).sum() + logprobs.cumsum(0).square().mean()
    total = total + torch.linalg.norm(logprobs) + logprobs.norm(p=3) + torch.dot(logprobs, old)
    total = total + rows.max(1).values.sum() + rows.mean(dim=(0, 1), keepdim=True).squeeze()
    return total, {"custom/any:sum": (rows > 0).any(), "custom/low:mean": rows.min()}


def shapes(logprobs, old, weights):
    pairs = logprobs.unsqueeze(1) - logprobs[None, :8]
    picked = logprobs[weights > 0]
    joined = torch.cat((logprobs[1:], old[:-1].detach(), picked), dim=0).flip(0)
    flat = joined.reshape(-1, 1).expand(-1, 2).transpose(0, 1).contiguous()
    total = F.logsigmoid(pairs).sum() / logprobs.shape[0] + flat.sum() * logprobs.numel()
    total = total + logprobs[..., -1] + logprobs[::2].sum() + logprobs.view(-1)[0].to(torch.float64)
    ramp = torch.arange(logprobs.size(0)) + torch.zeros_like(old) + torch.full_like(old, 0.5)
    return total + (ramp * logprobs).sum() * math.exp(logprobs.sum().detach()), {}


def losses(logprobs, old, weights):
    total = F.mse_loss(logprobs, old) + F.l1_loss(logprobs, old, reduction="sum")
    total = total + F.huber_loss(logprobs, old, delta=0.3) + F.smooth_l1_loss(logprobs, old)
    total = total + F.kl_div(logprobs, old.exp(), reduction="batchmean")
    total = total + F.kl_div(logprobs, old, log_target=True, reduction="sum")
    target = (weights > 0).float()
    return total + F.binary_cross_entropy_with_logits(logprobs, target), {}


@pytest.mark.parametrize("fn", [ppo, elementwise, reduces, shapes, losses])
def test_value_and_gradient_are_torchs(fn: Loss) -> None:
    rng = np.random.default_rng(3)
    arrays = [-rng.exponential(1.0, 24) - 0.01 for _ in range(2)] + [rng.normal(size=24)]
    logprobs, old, given = (torch.tensor(each) for each in arrays)
    logprobs.requires_grad_(True)
    value, metrics = fn(logprobs, old, given)
    value.backward()

    loss = find_loss(upload(fn, old=1, weights=1))
    ours = loss.compute(arrays[0], {"old": arrays[1], "weights": arrays[2]})

    assert ours.value == pytest.approx(value.item(), rel=1e-9)
    assert logprobs.grad is not None
    np.testing.assert_allclose(ours.grad, logprobs.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert ours.metrics == pytest.approx(
        {name: float(one.detach()) for name, one in metrics.items()}
    )


def test_ties_and_edges_have_torchs_gradients() -> None:
    def edges(logprobs):
        total = torch.maximum(logprobs, logprobs * 1) + logprobs.clamp(-1, 0) + logprobs.relu()
        return (total + logprobs.abs() ** 0).sum() + logprobs.amax() + logprobs.max(0)[0], {}

    array = np.array([0.0, -1.0, 0.0, -2.0])
    logprobs = torch.tensor(array, requires_grad=True)
    edges(logprobs)[0].backward()
    np.testing.assert_allclose(find_loss(upload(edges)).compute(array, {}).grad, logprobs.grad)


# --- passes --------------------------------------------------------------------------------------


def weighed(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighed:sum": loss, "custom/length:mean": weights.sum() * 0 + 1}


def test_pass_equals_built_in_loss(make_engine: MakeEngine) -> None:
    engine = make_engine(is_deterministic=True)
    config = {"loss_id": upload(weighed, weights=1)}
    batch = [datum(seed, 10 + seed) for seed in range(5)]
    outputs = []
    for name, request in (
        ("a", work(*batch)),
        ("b", work(*batch, loss="custom", **config)),  # type: ignore[arg-type]
    ):
        engine.create(name, spec())
        (output,) = engine.run_passes([Pass(adapter_id=name, request=request)])
        assert isinstance(output, ForwardBackwardOutput), output
        outputs.append(output)
        step(engine, name)
    assert torch.equal(weights(engine, "a"), weights(engine, "b"))
    builtin, custom = (output.metrics for output in outputs)
    assert custom["loss:sum"] == pytest.approx(builtin["loss:sum"], rel=1e-12)
    assert custom["custom/weighed:sum"] == pytest.approx(custom["loss:sum"])
    assert custom["custom/length:mean"] == 1.0


def test_micro_batches_do_not_change_the_result(make_engine: MakeEngine) -> None:
    def ratio(logprobs, old):
        squares = (logprobs - old) ** 2
        return squares.mean() + logprobs.max() * 0.1, {"custom/squares:mean": squares.mean()}

    config = {"loss_id": upload(ratio, old=1)}
    batch = [datum(n, 9 + n, old=np.full(9 + n, -0.5, np.float32)) for n in range(6)]
    results = []
    for options in ({}, {"step_tokens": 16}):
        engine = make_engine(is_deterministic=True, **options)
        engine.create("a", spec())
        request = work(*batch, loss="custom", **config)  # type: ignore[arg-type]
        (output,) = engine.run_passes([Pass(adapter_id="a", request=request)])
        assert isinstance(output, ForwardBackwardOutput), output
        results.append((output.metrics, step(engine, "a")))
    (first, first_step), (second, second_step) = results
    assert second == pytest.approx(first, rel=1e-6)
    assert second_step["grad_norm"] == pytest.approx(first_step["grad_norm"], rel=1e-5)


def test_failing_loss_affects_no_other_pass(engine: TorchEngine) -> None:
    """Which elements a mask selects is known only when the pass runs."""

    def fragile(logprobs):
        return (logprobs[logprobs < -1e9].max() + logprobs.sum()), {}

    for name in ("a", "b"):
        engine.create(name, spec())
    bad = work(datum(1), loss="custom", loss_id=upload(fragile))  # type: ignore[arg-type]
    passes = [Pass(adapter_id="a", request=bad), Pass(adapter_id="b", request=work(datum(2)))]
    refused, fine = engine.run_passes(passes)
    assert isinstance(refused, EngineFailure)
    assert "node 'max_1' of the custom loss fails" in refused.message
    assert refused.category == "user"
    assert engine._adapters["a"].state.gradient is None
    assert isinstance(fine, ForwardBackwardOutput)
    assert engine._adapters["b"].state.gradient is not None


def test_nan_is_reported_like_that_of_built_in_losses(engine: TorchEngine) -> None:
    engine.create("a", spec())
    nothing = upload(lambda logprobs: ((logprobs * 0).log().sum() * 0, {}))
    request = work(datum(1), loss="custom", loss_id=nothing)  # type: ignore[arg-type]
    (output,) = engine.run_passes([Pass(adapter_id="a", request=request)])
    assert isinstance(output, ForwardBackwardOutput), output
    assert math.isnan(output.metrics["loss:sum"])
    assert output.metrics["nonfinite_gradient:max"] == 1.0
    # The same engine goes on.
    engine.create("b", spec())
    assert math.isfinite(forward_backward(engine, "b", datum(1)).metrics["loss:sum"])


# --- hostile graphs ------------------------------------------------------------------------------

LOGPROBS = [CustomLossInput(name="logprobs", rank=1)]
START = CustomLossNode(op="placeholder", name="logprobs", target="logprobs")
REF = {"ref": "logprobs"}
END = CustomLossNode(
    op="output", name="output", target="output", args=[{"tuple": [{"ref": "last"}, {"dict": {}}]}]
)


def call(name: str, target: str, *args: Any, op: Any = "call_function", **kwargs: Any) -> Any:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)


def graph(*nodes: CustomLossNode) -> CustomLossGraph:
    return CustomLossGraph(nodes=[START, *nodes, END])


SUM = call("last", "torch.sum", REF)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([call("last", "os.system", "true")], "'os.system', which is not among"),
        ([call("last", "torch.load", "x")], "not among the operations"),
        ([call("last", "builtins.eval", "1")], "not among the operations"),
        ([call("last", "torch.serialization.load", "x")], "not among the operations"),
        ([call("last", "operator.attrgetter", "__class__")], "not among the operations"),
        ([call("last", "torch.rand_like", REF)], "not among the operations"),
        ([call("last", "getattr", REF, "__class__", op="call_method")], "attribute '__class__'"),
        ([call("last", "backward", REF, op="call_method")], "not among the operations"),
        ([call("last", "exp_", REF, op="call_method")], "not among the operations"),
        ([call("x", "weight", op="get_attr"), SUM], "is a get_attr; only calls"),
        ([call("x", "module", op="call_module"), SUM], "is a call_module; only calls"),
        ([call("x", "torch.exp", {"ref": "last"}), SUM], "'last', which is not an earlier node"),
        ([call("x", "torch.exp", {"ref": "x"}), SUM], "'x', which is not an earlier node"),
        ([call("logprobs", "torch.exp", REF), SUM], "not a unique name"),
        ([call(f"n{n}", "torch.exp", REF) for n in range(300)], "has 302 nodes"),
        ([call("x", "torch.cat", [[[[[[REF]]]]]]), SUM], "nested too deeply"),
        ([call("x", "torch.cat", [REF] * 65), SUM], "65 arguments"),
        ([call("x", "torch.sum", REF, dtype="y" * 65), SUM], "a text of 65 characters"),
        ([call("x", "torch.exp", {"code": "1"}), SUM], "an invalid 'code'"),
        ([call("x", "torch.exp", {"ref": 1, "b": 2}), SUM], "has an argument"),
        ([call("last", "torch.sum", "y" * 60) for _ in range(2)], "not a unique name"),
    ],
)
def test_hostile_graph_is_refused_at_upload(nodes: list[Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as refusal:
        loss = find_loss(make_loss_id(LOGPROBS, graph(*nodes)))
        # What is not reachable by name is refused when it is called.
        loss.compute(np.zeros(8), {})
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([call("big", "torch.zeros", {"tuple": [10**6, 10**6]}), SUM], "is too large"),
        ([call("big", "torch.arange", 10**15), SUM], "is too large"),
        ([call("big", "torch.arange", 1, {"float": "inf"}), SUM], "arange has no end"),
        ([call("big", "expand", REF, 10**9, 8, op="call_method"), SUM], "is too large"),
        ([call("big", "operator.pow", 10**9, 10**9), SUM], "fails|result too large|math range"),
        ([call("big", "operator.mul", 10**15, 10**15), SUM], "is too large"),
        ([call("big", "operator.mul", [1], 10**9), SUM], "is not a tensor or a number"),
        ([call("big", "operator.mul", "a", 10**9), SUM], "is not a tensor or a number"),
        ([call("big", "unsqueeze", REF, 99, op="call_method"), SUM], "fails"),
        ([call("big", "torch.exp", REF, REF, REF), SUM], "fails"),
        ([call("last", "torch.exp", REF)], r"returns \(8,\) as the loss"),
        ([call("last", "torch.zeros", {"tuple": []})], "does not depend on the log-prob"),
        ([call("last", "operator.getitem", {"tuple": [1, 2]}, 7)], "fails"),
        ([call("last", "operator.getitem", REF, {"tuple": [[0] * 60]})], "not a supported index"),
    ],
)
def test_hostile_call_is_refused_before_it_allocates(nodes: list[Any], reason: str) -> None:
    loss = find_loss(make_loss_id(LOGPROBS, graph(*nodes)))
    started = time.monotonic()
    with pytest.raises(InvalidInput, match=reason):
        loss.compute(np.zeros(8), {})
    assert time.monotonic() - started < 1.0


def test_outer_product_of_long_inputs_is_refused() -> None:
    def outer(logprobs):
        return (logprobs[:, None] * logprobs[None]).sum(), {}

    loss = find_loss(upload(outer))
    assert loss.compute(np.ones(64), {}).value == 64**2
    with pytest.raises(InvalidInput, match=r"shape \(5000, 5000\) is too large"):
        loss.compute(np.ones(5000), {})


@pytest.mark.parametrize(
    "loss_id",
    [
        "abc",
        "loss1-",
        "loss1-!!!",
        "loss1-" + base64.urlsafe_b64encode(b"x").decode(),
        # Decompresses to 100 MB.
        "loss1-" + base64.urlsafe_b64encode(zlib.compress(b" " * 10**8)).decode(),
        "loss1-" + base64.urlsafe_b64encode(zlib.compress(json.dumps([[], {}]).encode())).decode(),
        "loss1-" + "A" * 10**6,
    ],
)
def test_invalid_id_is_refused(loss_id: str) -> None:
    with pytest.raises(InvalidInput, match="is not the id of a custom loss"):
        find_loss(loss_id)


def test_forged_id_is_checked_like_an_upload() -> None:
    text = json.dumps(
        [[{"name": "logprobs", "rank": 1}], graph(call("x", "os.system"), SUM).model_dump()]
    )
    forged = "loss1-" + base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()
    with pytest.raises(InvalidInput, match=r"'os\.system', which is not among"):
        find_loss(forged)


def test_large_graph_is_refused() -> None:
    nodes = [call(f"n{n}", "torch.stack", [1.2345678901] * 64) for n in range(250)]
    with pytest.raises(InvalidInput, match=r"bytes; at most 65536"):
        make_loss_id(LOGPROBS, graph(*nodes, SUM))


def test_work_of_a_request_is_limited(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.create("a", spec())
    config = {"loss_id": upload(weighed, weights=1)}
    request = work(*[datum(n) for n in range(4)], loss="custom", **config)  # type: ignore[arg-type]
    for limit in ("MAX_EXAMPLE_ELEMENTS", "MAX_REQUEST_ELEMENTS"):
        with monkeypatch.context() as patch:
            patch.setattr(f"tinkex.engine.examples.{limit}", 20_000)
            (outcome,) = engine.run_passes([Pass(adapter_id="a", request=request)])
            is_refused = isinstance(outcome, EngineFailure)
            assert is_refused == (limit == "MAX_REQUEST_ELEMENTS"), outcome
    assert graphs.MAX_EXAMPLE_ELEMENTS * 8 <= 1 << 27


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "example 0 needs old with 0 dimensions for the custom loss, got nothing"),
        ({"old": np.zeros(12, np.float32)}, r"with 0 dimensions .* got shape \[12\]"),
    ],
)
def test_missing_input_is_refused(engine: TorchEngine, inputs: dict[str, Any], reason: str) -> None:
    engine.create("a", spec())
    loss_id = upload(lambda logprobs, old: ((logprobs * old).sum(), {}), old=0)
    request = work(datum(1, **inputs), loss="custom", loss_id=loss_id)  # type: ignore[arg-type]
    (outcome,) = engine.run_passes([Pass(adapter_id="a", request=request)])
    assert isinstance(outcome, EngineFailure)
    assert re.search(reason, outcome.message), outcome.message


def test_scalar_input_is_read(engine: TorchEngine) -> None:
    engine.create("a", spec())
    loss_id = upload(lambda logprobs, old: ((logprobs * old).sum(), {}), old=0)
    scalar = TensorData(data=[2.0], dtype="float32", shape=[])
    request = work(datum(1, old=scalar), loss="custom", loss_id=loss_id)  # type: ignore[arg-type]
    (outcome,) = engine.run_passes([Pass(adapter_id="a", request=request)])
    assert isinstance(outcome, ForwardBackwardOutput), outcome
