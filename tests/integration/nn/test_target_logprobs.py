from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integration.nn.logprobs_cases import (
    NUM_ROWS,
    PLANS,
    ROW_BYTES,
    VOCAB,
    make_case,
    several_targets,
)
from tests.support.tiny_models import tiny_host, tiny_qwen3
from tinkex.nn import lm_head as head_module
from tinkex.nn import target_logprobs
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.lora_training import SegmentedLora
from tinkex.nn.packed_attention import PackedAttention
from tinkex.nn.target_logprobs import TargetLogprobs

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several targets": {"rows": several_targets()},
    "bias": {"bias": True},
    "softcap": {"final_logit_softcapping": 3.0, "rows": several_targets()},
    "multiplier": {"logit_scale": 0.25},
    "divisor and softcap": {"logits_scaling": 2.0, "final_logit_softcapping": 5.0},
}


@pytest.fixture(params=list(PLANS))
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chunk size and memory limit."""
    name: str = request.param
    monkeypatch.setattr(target_logprobs, "_CHUNK_ROWS", PLANS[name][1])
    monkeypatch.setattr(target_logprobs, "_CHUNK_BYTES", 0)
    return name


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_autograd(case: str, plan: str) -> None:
    this = make_case(**CASES[case])
    logprobs_P, dhidden_TD, gradients = this.expected()
    scorer = this.scorer(plan)

    actual_P = scorer.logprobs()
    assert actual_P.dtype == torch.float32
    assert_close(actual_P, logprobs_P)
    assert_close(scorer.backward(this.grad_P), dhidden_TD)
    assert len(gradients) == 4
    for actual, expected in zip(this.gradients(), gradients, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("case", CASES)
def test_logprobs_and_grad_match_autograd(case: str, plan: str) -> None:
    this = make_case(**CASES[case])
    logprobs_P, dhidden_TD, gradients = this.expected()

    actual_P, actual_TD = this.scorer(plan).logprobs_and_grad(this.grad_P)
    assert_close(actual_P, logprobs_P)
    assert_close(actual_TD, dhidden_TD)
    for actual, expected in zip(this.gradients(), gradients, strict=True):
        assert_close(actual, expected)
    assert this.head.num_scored == len(set(this.rows_P))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_have_float32_logprobs(dtype: torch.dtype, plan: str) -> None:
    this = make_case(dtype=dtype, rows=several_targets(), final_logit_softcapping=20.0)
    logprobs_P, dhidden_TD, gradients = this.expected()
    scorer = this.scorer(plan)

    actual_P = scorer.logprobs()
    assert actual_P.dtype == torch.float32
    assert_close(actual_P, logprobs_P, 0.1)
    actual_TD = scorer.backward(this.grad_P)
    assert actual_TD.dtype == dtype
    assert (actual_TD.float() - dhidden_TD).norm() < 0.02 * dhidden_TD.norm()
    for actual, expected in zip(this.gradients(), gradients, strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


def test_low_probability_targets_keep_precision(plan: str) -> None:
    this = make_case()
    this.linear.weight.data.mul_(60.0)
    scorer = this.scorer(plan)

    logprobs_P, dhidden_TD, _ = this.expected()
    assert logprobs_P.min() < -200.0  # its probability is zero in float32
    actual_P = scorer.logprobs()
    torch.testing.assert_close(actual_P, logprobs_P, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scorer.backward(this.grad_P), dhidden_TD, rtol=1e-4, atol=1e-3)


def test_repeated_target_of_a_row_counts_twice(plan: str) -> None:
    this = make_case(rows=[3, 3, 3, 8])
    this.targets_P = np.array([7, 7, 9, 7])
    this.grad_P = torch.tensor([1.0, 2.0, -3.0, 0.5])
    _, dhidden_TD, _ = this.expected()
    scorer = this.scorer(plan)
    scorer.logprobs()
    actual_TD = scorer.backward(this.grad_P)
    assert actual_TD[3].abs().max() > 0.0  # although its gradients sum to zero
    assert_close(actual_TD, dhidden_TD)


# --- cost -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [range(NUM_ROWS), several_targets()], ids=["one", "several"])
def test_backward_skips_rows_with_zero_grad(rows: Sequence[int], plan: str) -> None:
    this = make_case(rows=rows)
    scorer = this.scorer(plan)
    scorer.logprobs()
    assert this.head.num_scored == len(set(rows))

    needed = {int(row) for row, grad in zip(rows, this.grad_P, strict=True) if grad != 0.0}
    dhidden_TD = scorer.backward(this.grad_P)
    assert 0 < len(needed) < len(set(rows))
    assert this.head.num_backward == len(needed)
    assert set(dhidden_TD.any(1).nonzero().flatten().tolist()) == needed


@pytest.mark.parametrize(
    ("name", "num_recomputed"), [("saved", 0), ("some saved", None), ("not saved", "all")]
)
def test_backward_recomputes_only_needed_rows_that_were_not_saved(
    name: str, num_recomputed: int | str | None
) -> None:
    this = make_case()
    scorer = this.scorer(name)
    scorer.logprobs()
    this.head.num_scored = 0
    scorer.backward(this.grad_P)
    needed = np.flatnonzero(this.grad_P.numpy())
    expected = {0: 0, "all": len(needed), None: int((needed >= 11).sum())}[num_recomputed]
    assert this.head.num_scored == expected


def test_only_rows_that_need_grad_are_saved() -> None:
    this = make_case(rows=several_targets())
    logprobs_P, dhidden_TD, gradients = this.expected()
    needs_grad_P = this.grad_P.numpy() != 0.0
    num_needed = len(set(this.rows_P[needs_grad_P]))
    scorer = this.scorer(max_bytes=num_needed * ROW_BYTES)

    assert_close(scorer.logprobs(needs_grad_P), logprobs_P)
    assert_close(scorer.backward(this.grad_P), dhidden_TD)
    for actual, expected in zip(this.gradients(), gradients, strict=True):
        assert_close(actual, expected)
    assert this.head.num_scored == len(set(this.rows_P))


def test_rows_marked_without_grad_are_recomputed_if_needed() -> None:
    this = make_case()
    _, dhidden_TD, _ = this.expected()
    scorer = this.scorer()
    scorer.logprobs(np.arange(NUM_ROWS) < 5)
    assert_close(scorer.backward(this.grad_P), dhidden_TD)
    num_recomputed = int(this.grad_P[5:].count_nonzero())
    assert this.head.num_scored == NUM_ROWS + num_recomputed


def test_zero_grad_skips_computation() -> None:
    this = make_case()
    scorer = this.scorer()
    scorer.logprobs()
    this.head.num_scored = 0
    dhidden_TD = scorer.backward(torch.zeros_like(this.grad_P))
    assert (this.head.num_scored, this.head.num_backward) == (0, 0)
    assert dhidden_TD.shape == this.hidden_TD.shape
    assert not dhidden_TD.any()


def test_empty_batch_has_no_logprobs_and_zero_grad(plan: str) -> None:
    this = make_case(rows=[])
    scorer = this.scorer(plan)
    assert scorer.logprobs().shape == (0,)
    assert not scorer.backward(this.grad_P).any()


class Logits(TorchDispatchMode):
    """Records the largest storage of results as wide as the vocabulary, except weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[-1:] == (VOCAB,):
                self._record(leaf.untyped_storage())
        return result

    def _record(self, memory: torch.UntypedStorage) -> None:
        if memory.data_ptr() not in self._weights:
            self.largest = max(self.largest, memory.nbytes())


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("way", ["one after the other", "at once"])
@pytest.mark.parametrize("num_fitting", [NUM_ROWS, NUM_ROWS // 2, 6])
def test_logits_stay_within_the_memory_limit(
    num_fitting: int, way: str, config: dict[str, float]
) -> None:
    this = make_case(**config)
    scorer = this.scorer(max_bytes=num_fitting * ROW_BYTES)
    with Logits([this.linear.weight, *this.flat_weights]) as seen:
        if way == "at once":
            scorer.logprobs_and_grad(this.grad_P)
        else:
            scorer.logprobs()
            scorer.backward(this.grad_P)
    assert 0 < seen.largest <= num_fitting * ROW_BYTES


def test_backward_releases_memory() -> None:
    this = make_case()
    scorer = this.scorer("some saved")
    scorer.logprobs()
    scorer.backward(this.grad_P)
    assert scorer._saved is None
    assert scorer._scratch is None


def test_results_are_bit_identical(plan: str) -> None:
    def run() -> list[Tensor]:
        this = make_case(rows=several_targets())
        scorer = this.scorer(plan)
        return [scorer.logprobs(), scorer.backward(this.grad_P), *this.gradients()]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


# --- with a model ---------------------------------------------------------------------------------
def test_hosted_model_matches_original_logprobs() -> None:
    tokens_T = torch.randint(211, (12,), generator=torch.Generator().manual_seed(1))
    targets_T = tokens_T.roll(-1)
    with torch.no_grad():
        logits_TV = tiny_qwen3()(input_ids=tokens_T[None]).logits[0]
    host = tiny_host()
    this = ForwardContext(SegmentedLora([]), PackedAttention([12]))
    with torch.no_grad():
        hidden_TD = host.hidden_states(tokens_T, torch.arange(12), this)
    scorer = TargetLogprobs(
        host.lm_head,
        hidden_TD,
        this.lora,
        np.arange(12),
        targets_T.numpy(),
        max_logits_bytes=1 << 20,
    )
    expected = logits_TV.log_softmax(-1)[torch.arange(12), targets_T]
    assert_close(scorer.logprobs(), expected)


def test_onednn_logits_match(monkeypatch: pytest.MonkeyPatch) -> None:
    this = make_case(bias=True)
    plain_MV, _ = this.head.logits(this.hidden_TD, SegmentedLora(this.segments))
    monkeypatch.setattr(head_module, "_LARGE_WEIGHT", 1)
    few_MV, _ = this.head.logits(this.hidden_TD, SegmentedLora(this.segments))
    assert_close(few_MV, plain_MV)
