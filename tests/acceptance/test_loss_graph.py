"""Custom losses as graphs: traced, rejected and encoded like the official SDK."""

from __future__ import annotations

import inspect
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from tinker.lib.public_interfaces import custom_loss as official

from tinkex.client.custom_loss import encode_graph, trace_loss
from tinkex.errors import InvalidInput

Loss = Callable[..., Any]
OWN_TENSOR = torch.ones(3)


# --- losses that can be traced ------------------------------------------------------------


def ppo(logprobs, old_logprobs, advantages, clip):
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - 0.2, 1 + 0.2) * clip
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return loss, {
        "custom/ratio:mean": ratio.mean(),
        "custom/clip.frac/x-1:sum": (ratio != clipped).float().sum(),
    }


def slices(logprobs, mask):
    tail = logprobs[..., 1:] + logprobs[:, None, 0].squeeze(1)[:, None]
    picked = tail[[0, 1], :-1:2]
    filled = torch.where(mask[..., 1:] > 0, tail, float("-inf"))
    low = torch.nan_to_num(filled, nan=float("nan"), posinf=math.inf, neginf=-1e4)
    return (low.sum() + picked.sum()) / logprobs.shape[0], {}


def constants(logprobs):
    zeros = torch.zeros(
        logprobs.shape, dtype=torch.float32, device=torch.device("cpu"), layout=torch.strided
    )
    flat = logprobs.contiguous(memory_format=torch.contiguous_format).to(torch.float64)
    total = F.softplus(flat).sum(dim=(0,), keepdim=False) + torch.special.expm1(zeros).sum()
    parts = torch.stack([total, zeros.sum()]), torch.cat((logprobs, zeros), dim=0)
    return parts[0].sum() + parts[1].sum() * math.exp(logprobs.sum()) ** 2, {}


def containers(logprobs, weights):
    pairs = torch.einsum("i,i->i", logprobs, weights)
    low, high = torch.aminmax(pairs)[0], torch.aminmax(pairs)[1]
    loss = -pairs.sum() + F.pad(input=pairs, pad=[1, 1], mode="constant", value=None).sum()
    return [loss, {"custom/low:mean": low, "custom/high:mean": high}]


TRACEABLE: list[tuple[Loss, dict[str, Any]]] = [
    (ppo, {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "clip": 0}),
    (slices, {"logprobs": 2, "mask": 2}),
    (constants, {"logprobs": 1}),
    (containers, {"logprobs": 1, "weights": 1}),
]


@pytest.mark.parametrize(("fn", "ranks"), TRACEABLE, ids=lambda each: getattr(each, "__name__", ""))
def test_encoded_graph_equals_official(fn: Loss, ranks: dict[str, Any]) -> None:
    theirs = official.trace_loss(fn, ranks, "session")
    ours = trace_loss(fn, ranks)
    assert ours.name == theirs.name
    assert [each.model_dump() for each in ours.inputs] == [
        each.model_dump() for each in theirs.inputs
    ]
    encoded = encode_graph(ours.graph)
    assert json.loads(encoded.model_dump_json()) == json.loads(
        official.encode_graph(theirs).model_dump_json()
    )


def test_comparison_covers_every_argument_form() -> None:
    text = "".join(
        encode_graph(trace_loss(fn, ranks).graph).model_dump_json() for fn, ranks in TRACEABLE
    )
    forms = ["ref", "tuple", "dict", "slice", "ellipsis", "float"]
    forms += ["dtype", "device", "layout", "memory_format"]
    assert [form for form in forms if f'{{"{form}":' not in text] == []
    for value in ('{"float":"inf"}', '{"float":"-inf"}', '{"float":"nan"}', '"operator.mul"'):
        assert value in text


# --- losses that are rejected -------------------------------------------------------------


def branches(logprobs):
    return (logprobs.sum() if logprobs.sum() > 0 else -logprobs.sum()), {}


def iterates(logprobs):
    return sum(each for each in logprobs), {}


def measures(logprobs):
    return logprobs.sum() / len(logprobs), {}


def calls_item(logprobs):
    return logprobs.sum() * logprobs.max().item(), {}


def calls_backward(logprobs):
    logprobs.sum().backward()
    return logprobs.sum(), {}


def calls_nothing_known(logprobs):
    return logprobs.no_such_method(), {}


def own_tensor(logprobs):
    return (logprobs * OWN_TENSOR).sum(), {}


def uses_module(logprobs):
    return torch.nn.Softplus()(logprobs).sum(), {}


def outside_library(logprobs):
    return statistics.fmean(logprobs), {}


@torch.fx.wrap
def wrapped(value):
    return value


def calls_wrapped(logprobs):
    return wrapped(logprobs).sum(), {}


def only_loss(logprobs):
    return logprobs.sum()


def three_results(logprobs):
    return logprobs.sum(), {}, logprobs


def raises_two_lines(logprobs):
    raise OSError("one\ntwo")


def number_loss(logprobs):
    return 1.5, {}


def metrics_list(logprobs):
    return logprobs.sum(), [1]


def metric_key(logprobs):
    return logprobs.sum(), {"custom/Loss:sum": logprobs.sum()}


def metric_suffix(logprobs):
    return logprobs.sum(), {"custom/loss:max": logprobs.sum()}


def metric_long(logprobs):
    return logprobs.sum(), {f"custom/{'x' * 65}:sum": logprobs.sum()}


def metric_number(logprobs):
    return logprobs.sum(), {"custom/n:sum": 2.5}


def no_parameters():
    return None


def wrong_first(weights, logprobs):
    return weights.sum(), {}


def upper_case(logprobs, Advantages):
    return logprobs.sum(), {}


def with_default(logprobs, scale=2.0):
    return logprobs.sum() * scale, {}


def keyword_only(logprobs, *, scale):
    return logprobs.sum() * scale, {}


def variadic(logprobs, *rest):
    return logprobs.sum(), {}


def two(logprobs, scale):
    return logprobs.sum() * scale, {}


exec(
    f"def seventeen(logprobs, {', '.join(f'x{n}' for n in range(16))}): return logprobs.sum(), {{}}"
)
exec(f"def long_name(logprobs, {'a' * 65}): return logprobs.sum(), {{}}")
SEVENTEEN: Loss = globals()["seventeen"]
LONG_NAME: Loss = globals()["long_name"]

ONE = {"logprobs": 1}
REFUSED: list[tuple[Loss, Any, str]] = [
    (branches, ONE, "'branches' has control flow that depends on tensor values .*torch.where"),
    (iterates, ONE, "'iterates' has control flow that depends on tensor values"),
    (measures, ONE, "'measures' cannot be traced: RuntimeError: 'len' is not supported"),
    (calls_item, ONE, r"'calls_item' calls item\(\), which returns no tensor"),
    (calls_backward, ONE, r"'calls_backward' calls backward\(\)"),
    (calls_nothing_known, ONE, r"calls no_such_method\(\), which tensors do not have"),
    (own_tensor, ONE, "'own_tensor' captures a tensor"),
    (uses_module, ONE, "'uses_module' cannot be traced: NameError"),
    (outside_library, ONE, "'outside_library'"),
    (calls_wrapped, ONE, "'calls_wrapped' calls wrapped of .*only torch and math"),
    (only_loss, ONE, r"'only_loss' returns sum_1; expected \(loss, metrics\)"),
    (three_results, ONE, r"'three_results' returns .*expected \(loss, metrics\)"),
    (raises_two_lines, ONE, "cannot be traced: OSError: one two"),
    (number_loss, ONE, "'number_loss' returns the loss 1.5; expected a tensor"),
    (metrics_list, ONE, r"'metrics_list' returns the metrics \[1\]; expected a dict"),
    (metric_key, ONE, "has a metric 'custom/Loss:sum'"),
    (metric_suffix, ONE, "has a metric 'custom/loss:max'"),
    (metric_long, ONE, "has a metric 'custom/xxx"),
    (metric_number, ONE, "metric 'custom/n:sum' of custom loss 'metric_number' is 2.5"),
    (no_parameters, {}, r"takes \[\]; its first parameter must be logprobs"),
    (wrong_first, {"weights": 1, "logprobs": 1}, r"takes \['weights', 'logprobs'\]"),
    (upper_case, {"logprobs": 1, "Advantages": 1}, "a parameter 'Advantages'"),
    (LONG_NAME, {"logprobs": 1, "a" * 65: 1}, "a parameter 'aaa"),
    (with_default, {"logprobs": 1, "scale": 0}, "a default in 'scale=2.0'"),
    (keyword_only, {"logprobs": 1, "scale": 0}, "'scale' that is keyword-only"),
    (variadic, {"logprobs": 1, "rest": 0}, r"'\*rest' that is variadic"),
    (SEVENTEEN, {"logprobs": 1}, "takes 17 parameters; at most 16"),
    (two, ONE, r"has \['logprobs'\]; expected \['logprobs', 'scale'\]"),
    (two, {"logprobs": 1, "scale": 0, "x": 1}, r"has \['logprobs', 'scale', 'x'\]"),
    (two, {"logprobs": 0, "scale": 0}, r"input_ranks\['logprobs'\] of .* is 0; .*\(1, 2\)"),
    (two, {"logprobs": 1, "scale": 3}, r"input_ranks\['scale'\] of .* is 3; .*\(0, 1, 2\)"),
]


@pytest.mark.parametrize(
    ("fn", "ranks", "sentence"),
    REFUSED,
    ids=[f"{n}-{each[0].__name__}" for n, each in enumerate(REFUSED)],
)
def test_losses_rejected_by_official_sdk_are_rejected(fn: Loss, ranks: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as refusal:
        trace_loss(fn, ranks)
    assert "\n" not in refusal.value.message
    with pytest.raises(ValueError):
        official.trace_loss(fn, ranks, "session")


def test_ranks_must_be_a_mapping() -> None:
    with pytest.raises(InvalidInput, match="has 1; expected"):
        trace_loss(two, cast(Any, 1))


def test_non_function_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="custom loss 3 has no readable parameters"):
        trace_loss(cast(Any, 3), {})


def test_module_that_calls_modules_is_rejected() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.nn.Softplus()
            self.__signature__ = inspect.signature(only_loss)

        def forward(self, logprobs):
            return self.act(logprobs).sum(), {}

    with pytest.raises(InvalidInput, match="'Net' calls the module 'act'"):
        trace_loss(Net(), cast(Any, ONE))


def test_argument_that_cannot_be_encoded_is_rejected() -> None:
    def turns(logprobs):
        return (logprobs * 1j).abs().sum(), {}

    traced = trace_loss(turns, cast(Any, ONE))
    with pytest.raises(InvalidInput, match="the constant 1j, a complex, which cannot be sent"):
        encode_graph(traced.graph)


def test_concurrent_traces_are_equal_and_restore_math() -> None:
    before = math.exp
    with ThreadPoolExecutor(8) as pool:
        traces = list(pool.map(lambda _: trace_loss(constants, cast(Any, ONE)), range(16)))
    assert len({each.graph.code for each in traces}) == 1
    assert math.exp is before
