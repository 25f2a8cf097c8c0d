"""Target log-probabilities and their pull equal plain autograd on all logits, for less."""

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

SCENES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several targets": {"rows": several_targets()},
    "bias": {"bias": True},
    "softcap": {"final_logit_softcapping": 3.0, "rows": several_targets()},
    "multiplier": {"logit_scale": 0.25},
    "divisor and softcap": {"logits_scaling": 2.0, "final_logit_softcapping": 5.0},
}


@pytest.fixture(params=list(PLANS))
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A way to cut and keep."""
    name: str = request.param
    monkeypatch.setattr(target_logprobs, "_CHUNK_ROWS", PLANS[name][1])
    monkeypatch.setattr(target_logprobs, "_CHUNK_BYTES", 0)
    return name


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", SCENES)
def test_values_and_gradients_equal_autograd_on_all_logits(case: str, plan: str) -> None:
    this = make_case(**SCENES[case])
    logprobs_P, dhidden_TD, gradients = this.expected()
    scorer = this.scorer(plan)

    found_P = scorer.logprobs()
    assert found_P.dtype == torch.float32
    assert_near(found_P, logprobs_P)
    assert_near(scorer.backward(this.slope_P), dhidden_TD)
    assert len(gradients) == 4
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert_near(found, wanted)


@pytest.mark.parametrize("case", SCENES)
def test_both_at_once_equals_one_after_the_other(case: str, plan: str) -> None:
    this = make_case(**SCENES[case])
    logprobs_P, dhidden_TD, gradients = this.expected()

    found_P, found_TD = this.scorer(plan).logprobs_and_grad(this.slope_P)
    assert_near(found_P, logprobs_P)
    assert_near(found_TD, dhidden_TD)
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert_near(found, wanted)
    assert this.head.num_scored == len(set(this.rows_P))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_and_its_logprobs_are_float32(dtype: torch.dtype, plan: str) -> None:
    this = make_case(dtype=dtype, rows=several_targets(), final_logit_softcapping=20.0)
    logprobs_P, dhidden_TD, gradients = this.expected()
    scorer = this.scorer(plan)

    found_P = scorer.logprobs()
    assert found_P.dtype == torch.float32
    assert_near(found_P, logprobs_P, 0.1)
    found_TD = scorer.backward(this.slope_P)
    assert found_TD.dtype == dtype
    assert (found_TD.float() - dhidden_TD).norm() < 0.02 * dhidden_TD.norm()
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_low_probability_targets_keep_precision(plan: str) -> None:
    this = make_case()
    this.linear.weight.data.mul_(60.0)
    scorer = this.scorer(plan)

    logprobs_P, dhidden_TD, _ = this.expected()
    assert logprobs_P.min() < -200.0  # its probability is zero in float32
    found_P = scorer.logprobs()
    torch.testing.assert_close(found_P, logprobs_P, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scorer.backward(this.slope_P), dhidden_TD, rtol=1e-4, atol=1e-3)


def test_the_same_target_twice_in_a_row_counts_twice(plan: str) -> None:
    this = make_case(rows=[3, 3, 3, 8])
    this.targets_P = np.array([7, 7, 9, 7])
    this.slope_P = torch.tensor([1.0, 2.0, -3.0, 0.5])
    _, dhidden_TD, _ = this.expected()
    scorer = this.scorer(plan)
    scorer.logprobs()
    found_TD = scorer.backward(this.slope_P)
    assert found_TD[3].abs().max() > 0.0  # although its slopes add up to nothing
    assert_near(found_TD, dhidden_TD)


# --- what it costs --------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [range(NUM_ROWS), several_targets()], ids=["one", "several"])
def test_going_back_visits_only_rows_whose_slopes_are_not_all_zero(
    rows: Sequence[int], plan: str
) -> None:
    this = make_case(rows=rows)
    scorer = this.scorer(plan)
    scorer.logprobs()
    assert this.head.num_scored == len(set(rows))

    needed = {int(row) for row, slope in zip(rows, this.slope_P, strict=True) if slope != 0.0}
    dhidden_TD = scorer.backward(this.slope_P)
    assert 0 < len(needed) < len(set(rows))
    assert this.head.num_pulled == len(needed)
    assert set(dhidden_TD.any(1).nonzero().flatten().tolist()) == needed


@pytest.mark.parametrize(
    ("name", "num_again"), [("kept", 0), ("some kept", None), ("not kept", "all")]
)
def test_only_needed_rows_that_were_not_kept_are_computed_again(
    name: str, num_again: int | str | None
) -> None:
    this = make_case()
    scorer = this.scorer(name)
    scorer.logprobs()
    this.head.num_scored = 0
    scorer.backward(this.slope_P)
    needed = np.flatnonzero(this.slope_P.numpy())
    wanted = {0: 0, "all": len(needed), None: int((needed >= 11).sum())}[num_again]
    assert this.head.num_scored == wanted


def test_memory_is_spent_on_rows_that_are_wanted() -> None:
    this = make_case(rows=several_targets())
    logprobs_P, dhidden_TD, gradients = this.expected()
    is_wanted_P = this.slope_P.numpy() != 0.0
    num_needed = len(set(this.rows_P[is_wanted_P]))
    scorer = this.scorer(max_bytes=num_needed * ROW_BYTES)

    assert_near(scorer.logprobs(is_wanted_P), logprobs_P)
    assert_near(scorer.backward(this.slope_P), dhidden_TD)
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert_near(found, wanted)
    assert this.head.num_scored == len(set(this.rows_P))


def test_rows_that_were_not_wanted_and_are_needed_after_all_are_computed_again() -> None:
    this = make_case()
    _, dhidden_TD, _ = this.expected()
    scorer = this.scorer()
    scorer.logprobs(np.arange(NUM_ROWS) < 5)
    assert_near(scorer.backward(this.slope_P), dhidden_TD)
    num_again = int(this.slope_P[5:].count_nonzero())
    assert this.head.num_scored == NUM_ROWS + num_again


def test_slopes_of_zero_cost_nothing() -> None:
    this = make_case()
    scorer = this.scorer()
    scorer.logprobs()
    this.head.num_scored = 0
    dhidden_TD = scorer.backward(torch.zeros_like(this.slope_P))
    assert (this.head.num_scored, this.head.num_pulled) == (0, 0)
    assert dhidden_TD.shape == this.hidden_TD.shape
    assert not dhidden_TD.any()


def test_no_pairs_are_no_error(plan: str) -> None:
    this = make_case(rows=[])
    scorer = this.scorer(plan)
    assert scorer.logprobs().shape == (0,)
    assert not scorer.backward(this.slope_P).any()


class Logits(TorchDispatchMode):
    """Notes the largest memory that results of the vocabulary's width lie in, weights aside."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[-1:] == (VOCAB,):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, memory: torch.UntypedStorage) -> None:
        if memory.data_ptr() not in self._weights:
            self.largest = max(self.largest, memory.nbytes())


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("way", ["one after the other", "at once"])
@pytest.mark.parametrize("num_fitting", [NUM_ROWS, NUM_ROWS // 2, 6])
def test_no_memory_beyond_the_limit_is_ever_taken_for_logits(
    num_fitting: int, way: str, config: dict[str, float]
) -> None:
    this = make_case(**config)
    scorer = this.scorer(max_bytes=num_fitting * ROW_BYTES)
    with Logits([this.linear.weight, *this.flat_weights]) as seen:
        if way == "at once":
            scorer.logprobs_and_grad(this.slope_P)
        else:
            scorer.logprobs()
            scorer.backward(this.slope_P)
    assert 0 < seen.largest <= num_fitting * ROW_BYTES


def test_nothing_is_held_after_the_way_back() -> None:
    this = make_case()
    scorer = this.scorer("some kept")
    scorer.logprobs()
    scorer.backward(this.slope_P)
    assert scorer._saved is None
    assert scorer._scratch is None


def test_the_same_numbers_come_out_bit_for_bit(plan: str) -> None:
    def run() -> list[Tensor]:
        this = make_case(rows=several_targets())
        scorer = this.scorer(plan)
        return [scorer.logprobs(), scorer.backward(this.slope_P), *this.gradients()]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


# --- with a model ---------------------------------------------------------------------------------
def test_a_hosted_models_targets_score_as_the_models_own() -> None:
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
    wanted = logits_TV.log_softmax(-1)[torch.arange(12), targets_T]
    assert_near(scorer.logprobs(), wanted)


def test_few_rows_of_a_large_head_have_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    this = make_case(bias=True)
    plain_MV, _ = this.head.logits(this.hidden_TD, SegmentedLora(this.segments))
    monkeypatch.setattr(head_module, "_LARGE_WEIGHT", 1)
    few_MV, _ = this.head.logits(this.hidden_TD, SegmentedLora(this.segments))
    assert_near(few_MV, plain_MV)
