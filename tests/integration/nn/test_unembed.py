"""Target log-probabilities and their pull equal plain autograd on all logits, for less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integration.nn.tiny import tiny_host, tiny_qwen3
from tinkex.nn import head as head_module
from tinkex.nn import unembed
from tinkex.nn.attention import PackedAttention
from tinkex.nn.head import Head
from tinkex.nn.running import LowRankRows, Pass
from tinkex.nn.segments import Segment, Segments
from tinkex.nn.sites import Layout, Part, Site
from tinkex.nn.unembed import Scorer

WIDTH, VOCAB = 24, 101
NUM_ROWS = 40
ROW_BYTES = VOCAB * 4
SITE = Site(part=Part.UNEMBED, paths=("lm_head",), in_features=WIDTH, out_features=(VOCAB,))
#: Where the rows of each adapter are, its rank, whether it adapts the head, whether it is trained.
#: Rows 27 to 32 are nobody's.
OWNERS = (
    (0, 13, 4, True, True),
    (13, 20, 2, True, True),
    (20, 27, 3, False, True),
    (33, 40, 5, True, False),
)
#: Memory for logits, and the rows of a chunk: all kept at once or in chunks, some, and none.
PLANS = {
    "kept": (1 << 30, 1 << 20, True),
    "kept in chunks": (1 << 30, 7, True),
    "some kept": (11 * ROW_BYTES, 5, True),
    "one row at a time": (ROW_BYTES, 8, True),
    "less than a row": (1, 8, True),
    "not kept": (1 << 30, 9, False),
}


class CountingHead(Head):
    """Notes how many rows go through it each way."""

    num_scored = 0
    num_pulled = 0

    def logits(
        self, hidden_MD: Tensor, rows: LowRankRows, out_MV: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        self.num_scored += len(hidden_MD)
        return super().logits(hidden_MD, rows, out_MV)

    def pull(self, hidden_MD: Tensor, *others: Any) -> Tensor:
        self.num_pulled += len(hidden_MD)
        return super().pull(hidden_MD, *others)


@dataclass
class Scene:
    """A head, rows of several adapters, and pairs to score."""

    linear: nn.Linear
    config: SimpleNamespace
    head: CountingHead
    hidden_TD: Tensor
    segments: list[Segment]
    flats: list[Tensor]
    rows_P: npt.NDArray[np.int64]
    targets_P: npt.NDArray[np.int64]
    slope_P: Tensor

    def scorer(self, plan: str = "kept", *, max_bytes: int | None = None) -> Scorer:
        planned_bytes, _, is_kept = PLANS[plan]
        return Scorer(
            self.head,
            self.hidden_TD,
            Segments(self.segments),
            self.rows_P,
            self.targets_P,
            max_logits_bytes=planned_bytes if max_bytes is None else max_bytes,
            is_kept=is_kept,
        )

    def gradients(self) -> list[Tensor]:
        """What the trained adapters' heads gathered."""
        return [
            part
            for one in self.segments
            for pair in one.gradient or ()
            if pair is not None
            for part in (pair.down, *pair.ups)
        ]

    def expected(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Log-probabilities, the hidden states' gradient and the adapters', by plain autograd."""
        hidden_TD = self.hidden_TD.float().requires_grad_()
        bias = None if self.linear.bias is None else self.linear.bias.float()
        logits_TV = nn.functional.linear(hidden_TD, self.linear.weight.float(), bias)
        parts, leaves = [torch.zeros_like(logits_TV)], []
        for one in self.segments:
            pair = one.weights[0]
            if pair is None:
                continue
            down, up = (x.clone().requires_grad_() for x in (pair.down, pair.ups[0]))
            mine = hidden_TD[one.start : one.stop] @ down.t() @ up.t() * one.scale
            parts.append(nn.functional.pad(mine, (0, 0, one.start, NUM_ROWS - one.stop)))
            leaves += [down, up] if one.gradient is not None else []
        logits_TV = logits_TV + torch.stack(parts).sum(0)
        logits_TV = logits_TV * getattr(self.config, "logit_scale", 1.0)
        logits_TV = logits_TV / getattr(self.config, "logits_scaling", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits_TV = logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
        logprobs_P = logits_TV.log_softmax(-1)[self.rows_P, self.targets_P]
        (logprobs_P * self.slope_P).sum().backward()
        assert hidden_TD.grad is not None
        return (
            logprobs_P.detach(),
            hidden_TD.grad,
            [leaf.grad for leaf in leaves if leaf.grad is not None],
        )


def make_scene(
    *,
    rows: Sequence[int] = tuple(range(NUM_ROWS)),
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    **config: float,
) -> Scene:
    """A scene whose rows have one target each; every third slope or so is zero."""
    dice = torch.Generator().manual_seed(5)
    linear = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)
    for parameter in linear.parameters():
        nn.init.normal_(parameter, generator=dice)
    segments, flats = [], []
    for start, stop, rank, has_head, is_trained in OWNERS:
        layout = Layout([SITE], rank, {Part.UNEMBED} if has_head else set())
        weights = torch.randn(layout.size, generator=dice) * 0.2
        gradient = layout.views(torch.zeros_like(weights)) if is_trained else None
        segments.append(Segment(start, stop, 32 / rank / 8, layout.views(weights), gradient))
        flats.append(weights)
    num_pairs = len(rows)
    slope_P = torch.randn(num_pairs, generator=dice)
    slope_P[torch.rand(num_pairs, generator=dice) < 0.4] = 0.0
    space = SimpleNamespace(**config)
    return Scene(
        linear=linear,
        config=space,
        head=CountingHead(0, linear, space),
        hidden_TD=torch.randn(NUM_ROWS, WIDTH, generator=dice).to(dtype),
        segments=segments,
        flats=flats,
        rows_P=np.array(rows, dtype=np.int64),
        targets_P=torch.randint(VOCAB, (num_pairs,), generator=dice).numpy(),
        slope_P=slope_P,
    )


def several_targets() -> list[int]:
    """Rows with no target, with one, and with up to four, where no two adapters agree."""
    counts = [1] * 13 + [4] * 7 + [0, 2, 3, 1, 0, 1, 2] + [0] * 6 + [3, 1, 1, 2, 0, 0, 1]
    return [row for row, count in enumerate(counts) for _ in range(count)]


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
    monkeypatch.setattr(unembed, "_CHUNK_ROWS", PLANS[name][1])
    monkeypatch.setattr(unembed, "_CHUNK_BYTES", 0)
    return name


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scene", SCENES)
def test_values_and_gradients_equal_autograd_on_all_logits(scene: str, plan: str) -> None:
    this = make_scene(**SCENES[scene])
    logprobs_P, dhidden_TD, gradients = this.expected()
    scorer = this.scorer(plan)

    found_P = scorer.logprobs()
    assert found_P.dtype == torch.float32
    assert_near(found_P, logprobs_P)
    assert_near(scorer.pull(this.slope_P), dhidden_TD)
    assert len(gradients) == 4
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert_near(found, wanted)


@pytest.mark.parametrize("scene", SCENES)
def test_both_at_once_equals_one_after_the_other(scene: str, plan: str) -> None:
    this = make_scene(**SCENES[scene])
    logprobs_P, dhidden_TD, gradients = this.expected()

    found_P, found_TD = this.scorer(plan).logprobs_and_pull(this.slope_P)
    assert_near(found_P, logprobs_P)
    assert_near(found_TD, dhidden_TD)
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert_near(found, wanted)
    assert this.head.num_scored == len(set(this.rows_P))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_and_its_logprobs_are_float32(dtype: torch.dtype, plan: str) -> None:
    this = make_scene(dtype=dtype, rows=several_targets(), final_logit_softcapping=20.0)
    logprobs_P, dhidden_TD, gradients = this.expected()
    scorer = this.scorer(plan)

    found_P = scorer.logprobs()
    assert found_P.dtype == torch.float32
    assert_near(found_P, logprobs_P, 0.1)
    found_TD = scorer.pull(this.slope_P)
    assert found_TD.dtype == dtype
    assert (found_TD.float() - dhidden_TD).norm() < 0.02 * dhidden_TD.norm()
    for found, wanted in zip(this.gradients(), gradients, strict=True):
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_far_fetched_targets_keep_their_logprobs(plan: str) -> None:
    this = make_scene()
    this.linear.weight.data.mul_(60.0)
    scorer = this.scorer(plan)

    logprobs_P, dhidden_TD, _ = this.expected()
    assert logprobs_P.min() < -200.0  # its probability is zero in float32
    found_P = scorer.logprobs()
    torch.testing.assert_close(found_P, logprobs_P, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scorer.pull(this.slope_P), dhidden_TD, rtol=1e-4, atol=1e-3)


def test_the_same_target_twice_in_a_row_counts_twice(plan: str) -> None:
    this = make_scene(rows=[3, 3, 3, 8])
    this.targets_P = np.array([7, 7, 9, 7])
    this.slope_P = torch.tensor([1.0, 2.0, -3.0, 0.5])
    _, dhidden_TD, _ = this.expected()
    scorer = this.scorer(plan)
    scorer.logprobs()
    found_TD = scorer.pull(this.slope_P)
    assert found_TD[3].abs().max() > 0.0  # although its slopes add up to nothing
    assert_near(found_TD, dhidden_TD)


# --- what it costs --------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [range(NUM_ROWS), several_targets()], ids=["one", "several"])
def test_going_back_visits_only_rows_whose_slopes_are_not_all_zero(
    rows: Sequence[int], plan: str
) -> None:
    this = make_scene(rows=rows)
    scorer = this.scorer(plan)
    scorer.logprobs()
    assert this.head.num_scored == len(set(rows))

    needed = {int(row) for row, slope in zip(rows, this.slope_P, strict=True) if slope != 0.0}
    dhidden_TD = scorer.pull(this.slope_P)
    assert 0 < len(needed) < len(set(rows))
    assert this.head.num_pulled == len(needed)
    assert set(dhidden_TD.any(1).nonzero().flatten().tolist()) == needed


@pytest.mark.parametrize(
    ("name", "num_again"), [("kept", 0), ("some kept", None), ("not kept", "all")]
)
def test_only_needed_rows_that_were_not_kept_are_computed_again(
    name: str, num_again: int | str | None
) -> None:
    this = make_scene()
    scorer = this.scorer(name)
    scorer.logprobs()
    this.head.num_scored = 0
    scorer.pull(this.slope_P)
    needed = np.flatnonzero(this.slope_P.numpy())
    wanted = {0: 0, "all": len(needed), None: int((needed >= 11).sum())}[num_again]
    assert this.head.num_scored == wanted


def test_slopes_of_zero_cost_nothing() -> None:
    this = make_scene()
    scorer = this.scorer()
    scorer.logprobs()
    this.head.num_scored = 0
    dhidden_TD = scorer.pull(torch.zeros_like(this.slope_P))
    assert (this.head.num_scored, this.head.num_pulled) == (0, 0)
    assert dhidden_TD.shape == this.hidden_TD.shape
    assert not dhidden_TD.any()


def test_no_pairs_are_no_error(plan: str) -> None:
    this = make_scene(rows=[])
    scorer = this.scorer(plan)
    assert scorer.logprobs().shape == (0,)
    assert not scorer.pull(this.slope_P).any()


class Allocations(TorchDispatchMode):
    """Notes the largest memory that any operation's result lies in."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("way", ["one after the other", "at once"])
@pytest.mark.parametrize("num_fitting", [NUM_ROWS, NUM_ROWS // 2, 6])
def test_no_memory_beyond_the_limit_is_ever_taken_for_logits(
    num_fitting: int, way: str, config: dict[str, float]
) -> None:
    this = make_scene(**config)
    scorer = this.scorer(max_bytes=num_fitting * ROW_BYTES)
    with Allocations() as seen:
        if way == "at once":
            scorer.logprobs_and_pull(this.slope_P)
        else:
            scorer.logprobs()
            scorer.pull(this.slope_P)
    largest_besides = this.linear.weight.numel() * 4
    assert seen.largest <= max(num_fitting * ROW_BYTES, largest_besides)
    assert seen.largest >= num_fitting * ROW_BYTES or way == "at once"


def test_nothing_is_held_after_the_way_back() -> None:
    this = make_scene()
    scorer = this.scorer("some kept")
    scorer.logprobs()
    scorer.pull(this.slope_P)
    assert scorer._kept is None
    assert scorer._scratch is None


def test_the_same_numbers_come_out_bit_for_bit(plan: str) -> None:
    def run() -> list[Tensor]:
        this = make_scene(rows=several_targets())
        scorer = this.scorer(plan)
        return [scorer.logprobs(), scorer.pull(this.slope_P), *this.gradients()]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


# --- with a model ---------------------------------------------------------------------------------
def test_a_hosted_models_targets_score_as_the_models_own() -> None:
    tokens_T = torch.randint(211, (12,), generator=torch.Generator().manual_seed(1))
    targets_T = tokens_T.roll(-1)
    with torch.no_grad():
        logits_TV = tiny_qwen3()(input_ids=tokens_T[None]).logits[0]
    host = tiny_host()
    this = Pass(Segments([]), PackedAttention([12]))
    with torch.no_grad():
        hidden_TD = host.hidden(tokens_T, torch.arange(12), this)
    scorer = Scorer(
        host.head, hidden_TD, this.rows, np.arange(12), targets_T.numpy(), max_logits_bytes=1 << 20
    )
    wanted = logits_TV.log_softmax(-1)[torch.arange(12), targets_T]
    assert_near(scorer.logprobs(), wanted)


def test_few_rows_of_a_large_head_have_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    this = make_scene(bias=True)
    plain_MV, _ = this.head.logits(this.hidden_TD, Segments(this.segments))
    monkeypatch.setattr(head_module, "_LARGE_WEIGHT", 1)
    few_MV, _ = this.head.logits(this.hidden_TD, Segments(this.segments))
    assert_near(few_MV, plain_MV)
