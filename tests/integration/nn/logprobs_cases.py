"""Cases for target log-probabilities: rows of several adapters, and autograd as reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import LoraRows
from tinkex.nn.lm_head import LMHead
from tinkex.nn.lora_layout import LoraLayout, LoraTarget, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.target_logprobs import TargetLogprobs

WIDTH, VOCAB = 24, 101
NUM_ROWS = 40
ROW_BYTES = VOCAB * 4
TARGET = LoraTarget(
    kind=TargetKind.UNEMBED, paths=("lm_head",), in_features=WIDTH, out_features=(VOCAB,)
)
#: Start, stop and rank of each adapter, whether it adapts the head, whether it is trained.
#: Rows 27 to 32 have no adapter.
ADAPTERS = (
    (0, 13, 4, True, True),
    (13, 20, 2, True, True),
    (20, 27, 3, False, True),
    (33, 40, 5, True, False),
)
#: Bytes for logits, rows per chunk, and whether log-probabilities are saved.
PLANS = {
    "saved": (1 << 30, 1 << 20, True),
    "saved in chunks": (1 << 30, 7, True),
    "some saved": (11 * ROW_BYTES, 5, True),
    "one row at a time": (ROW_BYTES, 8, True),
    "less than a row": (1, 8, True),
    "not saved": (1 << 30, 9, False),
}


class CountingHead(LMHead):
    """Counts the rows of forward and backward."""

    num_scored = 0
    num_backward = 0

    def logits(
        self, hidden_MD: Tensor, lora: LoraRows, out_MV: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        self.num_scored += len(hidden_MD)
        return super().logits(hidden_MD, lora, out_MV)

    def backward(self, hidden_MD: Tensor, *others: Any) -> Tensor:
        self.num_backward += len(hidden_MD)
        return super().backward(hidden_MD, *others)


@dataclass
class LogprobsCase:
    """A head, rows of several adapters, and pairs to score."""

    linear: nn.Linear
    config: SimpleNamespace
    head: CountingHead
    hidden_TD: Tensor
    segments: list[LoraSegment]
    flat_weights: list[Tensor]
    rows_P: npt.NDArray[np.int64]
    targets_P: npt.NDArray[np.int64]
    grad_P: Tensor

    def scorer(self, plan: str = "saved", *, max_bytes: int | None = None) -> TargetLogprobs:
        planned_bytes, _, save_logprobs = PLANS[plan]
        return TargetLogprobs(
            self.head,
            self.hidden_TD,
            SegmentedLora(self.segments),
            self.rows_P,
            self.targets_P,
            max_logits_bytes=planned_bytes if max_bytes is None else max_bytes,
            save_logprobs=save_logprobs,
        )

    def gradients(self) -> list[Tensor]:
        """Accumulated gradients of the trained adapters."""
        return [
            part
            for one in self.segments
            for pair in one.gradient or ()
            if pair is not None
            for part in (pair.down, *pair.ups)
        ]

    def expected(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Log-probabilities and gradients of hidden states and adapters, by autograd."""
        hidden_TD = self.hidden_TD.float().requires_grad_()
        bias = None if self.linear.bias is None else self.linear.bias.float()
        logits_TV = nn.functional.linear(hidden_TD, self.linear.weight.float(), bias)
        parts, leaves = [torch.zeros_like(logits_TV)], []
        for one in self.segments:
            pair = one.weights[0]
            if pair is None:
                continue
            down, up = (x.clone().requires_grad_() for x in (pair.down, pair.ups[0]))
            update = hidden_TD[one.start : one.stop] @ down.t() @ up.t() * one.scale
            parts.append(nn.functional.pad(update, (0, 0, one.start, NUM_ROWS - one.stop)))
            leaves += [down, up] if one.gradient is not None else []
        logits_TV = logits_TV + torch.stack(parts).sum(0)
        logits_TV = logits_TV * getattr(self.config, "logit_scale", 1.0)
        logits_TV = logits_TV / getattr(self.config, "logits_scaling", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits_TV = logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
        logprobs_P = logits_TV.log_softmax(-1)[self.rows_P, self.targets_P]
        (logprobs_P * self.grad_P).sum().backward()
        assert hidden_TD.grad is not None
        return (
            logprobs_P.detach(),
            hidden_TD.grad,
            [leaf.grad for leaf in leaves if leaf.grad is not None],
        )


def make_case(
    *,
    rows: Sequence[int] = tuple(range(NUM_ROWS)),
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    **config: float,
) -> LogprobsCase:
    """Make a case; about 40% of the gradients are zero."""
    rng = torch.Generator().manual_seed(5)
    linear = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)
    for parameter in linear.parameters():
        nn.init.normal_(parameter, generator=rng)
    segments, flat_weights = [], []
    for start, stop, rank, has_head, is_trained in ADAPTERS:
        layout = LoraLayout([TARGET], rank, {TargetKind.UNEMBED} if has_head else set())
        weights = torch.randn(layout.size, generator=rng) * 0.2
        gradient = layout.views(torch.zeros_like(weights)) if is_trained else None
        segments.append(LoraSegment(start, stop, 32 / rank / 8, layout.views(weights), gradient))
        flat_weights.append(weights)
    num_pairs = len(rows)
    grad_P = torch.randn(num_pairs, generator=rng)
    grad_P[torch.rand(num_pairs, generator=rng) < 0.4] = 0.0
    namespace = SimpleNamespace(**config)
    return LogprobsCase(
        linear=linear,
        config=namespace,
        head=CountingHead(0, linear, namespace),
        hidden_TD=torch.randn(NUM_ROWS, WIDTH, generator=rng).to(dtype),
        segments=segments,
        flat_weights=flat_weights,
        rows_P=np.array(rows, dtype=np.int64),
        targets_P=torch.randint(VOCAB, (num_pairs,), generator=rng).numpy(),
        grad_P=grad_P,
    )


def several_targets() -> list[int]:
    """Rows with zero to four targets."""
    counts = [1] * 13 + [4] * 7 + [0, 2, 3, 1, 0, 1, 2] + [0] * 6 + [3, 1, 1, 2, 0, 0, 1]
    return [row for row, count in enumerate(counts) for _ in range(count)]
