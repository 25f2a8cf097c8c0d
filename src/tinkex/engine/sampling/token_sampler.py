"""Random numbers that depend on a seed and a stream alone, whatever else is drawn."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.sampling.request import SampleSpec

_UINT64_MASK = (1 << 64) - 1
#: The stream of what is drawn along a prompt; no sample has this number.
PROMPT_STREAM = _UINT64_MASK
#: How many numbers are drawn at once.
_BUFFER_SIZE = 64


class RandomStream:
    """The random numbers of one stream of a seed: the t-th is always the same.

    They depend on the seed and the stream alone, whatever else is drawn at the same time.
    """

    def __init__(self, seed: int, stream: int, *, num_skipped: int = 0) -> None:
        key = np.array([seed & _UINT64_MASK, stream & _UINT64_MASK], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._generator.random(num_skipped)
        self._buffer: list[float] = []

    def uniform(self) -> float:
        """The next number, from 0 up to but not including 1."""
        if not self._buffer:
            self._buffer = self._generator.random(_BUFFER_SIZE).tolist()
            self._buffer.reverse()
        return self._buffer.pop()

    def uniform_array(self, *shape: int) -> npt.NDArray[np.float64]:
        """Many numbers at once."""
        return self._generator.random(shape)


_BLOCK_SIZE = 128
#: How many candidates top-p looks at first; few rows need more, and sorting all is slow.
_FIRST_CANDIDATES = (64, 1024)
#: Sharper than this is as good as greedy, and float32 can still divide by it.
_MIN_TEMPERATURE = 1e-30
#: Below this, logits are brought near zero before they are divided.
_LOW_TEMPERATURE = 1e-3


class SampledTokens(NamedTuple):
    """What was chosen for each row."""

    tokens: list[int]
    logprobs: list[float]
    """Of the tempered distribution, before top-k and top-p cut it; of the model's own if greedy."""
    topk_ids: npt.NDArray[np.int32] | None
    topk_logprobs: npt.NDArray[np.float32] | None
    """The likeliest tokens; as many columns as any row wants."""

    def topk_for_row(
        self, row: int, k: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """A row's likeliest tokens; None if it wants none.

        They are copies: a view would keep the rows of all others in memory.
        """
        if not k or self.topk_ids is None or self.topk_logprobs is None:
            return None
        return self.topk_ids[row, :k].copy(), self.topk_logprobs[row, :k].copy()


class SamplingSettings:
    """How the rows of a batch are to be chosen from; they stay while the rows do."""

    def __init__(self, specs: Many[SampleSpec], device: torch.device) -> None:
        temperatures = np.array([ask.temperature for ask in specs])
        is_greedy = temperatures == 0.0
        divisors = np.where(is_greedy, 1.0, np.maximum(temperatures, _MIN_TEMPERATURE))
        self.divisors_M1 = None
        if (divisors != 1.0).any():
            self.divisors_M1 = torch.tensor(divisors, dtype=torch.float32, device=device)[:, None]
        self.has_low_temperature = bool((divisors < _LOW_TEMPERATURE).any())
        self.has_greedy = bool(is_greedy.any())
        self.has_random = not is_greedy.all()
        self.is_greedy_M = torch.tensor(is_greedy, device=device)
        cut = [
            row
            for row, ask in enumerate(specs)
            if ask.temperature > 0.0 and (ask.top_k or ask.top_p < 1.0)
        ]
        self.truncated_rows = torch.tensor(cut, dtype=torch.long, device=device)
        self.truncations = [(specs[row].top_k, specs[row].top_p) for row in cut]
        self.num_topk = max(ask.num_topk for ask in specs)


def sample_tokens(
    logits_MV: Tensor, settings: SamplingSettings, uniforms_M: npt.NDArray[np.float64]
) -> SampledTokens:
    """One token for each row; the logits are used up."""
    logits_MV = logits_MV.float()
    _apply_temperature(logits_MV, settings)
    chances_MV = torch.softmax(logits_MV, dim=-1)
    tokens_M = _select_tokens(logits_MV, chances_MV, settings, uniforms_M)
    picked_M1 = tokens_M.unsqueeze(1)
    chance_M = chances_MV.gather(1, picked_M1).squeeze(1).double()
    logprobs_M = chance_M.log()
    ids, values = None, None
    if settings.num_topk:
        total_M1 = logits_MV.gather(1, picked_M1).double() - logprobs_M.unsqueeze(1)
        found = logits_MV.topk(settings.num_topk, dim=-1)
        ids = found.indices.cpu().numpy().astype(np.int32)
        values = (found.values.double() - total_M1).cpu().numpy().astype(np.float32)
    return SampledTokens(tokens_M.tolist(), logprobs_M.tolist(), ids, values)


def _apply_temperature(logits_MV: Tensor, settings: SamplingSettings) -> None:
    if settings.has_low_temperature:
        logits_MV.sub_(logits_MV.amax(dim=-1, keepdim=True))
    if settings.divisors_M1 is not None:
        logits_MV.div_(settings.divisors_M1)


def _select_tokens(
    logits_MV: Tensor,
    probs_MV: Tensor,
    settings: SamplingSettings,
    uniforms_M: npt.NDArray[np.float64],
) -> Tensor:
    if not settings.has_random:
        return greedy(logits_MV)
    numbers = torch.from_numpy(uniforms_M).to(logits_MV.device)
    tokens_M = draw_tokens(probs_MV, numbers)
    if settings.truncations:
        rows = settings.truncated_rows
        tokens_M[rows] = draw_truncated(probs_MV[rows], settings.truncations, numbers[rows])
    if settings.has_greedy:
        tokens_M = torch.where(settings.is_greedy_M, greedy(logits_MV), tokens_M)
    return tokens_M


def greedy(logits_MV: Tensor) -> Tensor:
    """Each row's likeliest token; of equals, the lowest id."""
    # The largest of each block is found much faster than where it is.
    best_MB = _reduce_blocks(logits_MV, "amax")
    block_M = best_MB.argmax(dim=-1)
    ids, inside = _gather_block(logits_MV, block_M, float("-inf"))
    tokens_M = ids.gather(1, inside.argmax(dim=-1, keepdim=True)).squeeze(1)
    return tokens_M.clamp_(max=logits_MV.shape[1] - 1)


def draw_tokens(weights_MV: Tensor, uniforms_M: Tensor) -> Tensor:
    """A token for each row, as likely as its weight, decided by a number from 0 to 1."""
    totals_MB = _reduce_blocks(weights_MV, "sum").double().cumsum(dim=-1)
    target_M = uniforms_M * totals_MB[:, -1]
    block_M = _first_above(totals_MB, target_M)
    before_MB = torch.nn.functional.pad(totals_MB, (1, 0))
    target_M = target_M - before_MB.gather(1, block_M.unsqueeze(1)).squeeze(1)
    ids, inside = _gather_block(weights_MV, block_M, 0.0)
    place_M = _first_above(inside.double().cumsum(dim=-1), target_M)
    tokens_M = ids.gather(1, place_M.unsqueeze(1)).squeeze(1)
    # Weights that are no numbers lead anywhere; it is for the caller to notice.
    return tokens_M.clamp_(max=weights_MV.shape[1] - 1)


def draw_truncated(
    probs_MV: Tensor, truncations: Many[tuple[int, float]], uniforms_M: Tensor
) -> Tensor:
    """The same from the likeliest tokens alone: top-k, then top-p of those."""
    tokens_M = torch.empty(len(truncations), dtype=torch.long, device=probs_MV.device)
    left = list(range(len(truncations)))
    for num in (*_FIRST_CANDIDATES, probs_MV.shape[1]):
        if not left:
            break
        rows = torch.tensor(left, device=probs_MV.device)
        ids_MK, weights_MK, is_enough_M = _truncated_candidates(
            probs_MV[rows], [truncations[row] for row in left], num
        )
        place_M1 = _first_above(
            weights_MK.cumsum(dim=-1), uniforms_M[rows] * weights_MK.sum(dim=-1)
        ).unsqueeze(1)
        tokens_M[rows] = ids_MK.gather(1, place_M1).squeeze(1)
        left = [
            row for row, is_enough in zip(left, is_enough_M.tolist(), strict=True) if not is_enough
        ]
    return tokens_M


def _truncated_candidates(
    probs_MV: Tensor, truncations: Many[tuple[int, float]], num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Some likeliest tokens by id, what is left of their chances, and whether they are all."""
    num_all = probs_MV.shape[1]
    num = min(num, num_all)
    found = probs_MV.topk(num, dim=-1)
    chances_MK = found.values.double()
    ks = torch.tensor([k or num_all for k, _ in truncations], device=probs_MV.device)[:, None]
    ps = torch.tensor([p for _, p in truncations], dtype=torch.float64, device=probs_MV.device)[
        :, None
    ]
    order = torch.arange(num, device=probs_MV.device)
    kept_MK = torch.where(order < ks, chances_MK, 0.0)
    # Of all tokens if there is no top-k; else the k must be among those found, or more are needed.
    whole_M1 = torch.where(
        ks < num_all,
        kept_MK.sum(-1, keepdim=True),
        probs_MV.sum(-1, dtype=torch.float64)[:, None],
    )
    running_MK = kept_MK.cumsum(dim=-1)
    # A token is kept if those before it do not reach top_p, so the first always is.
    is_in_MK = (running_MK - kept_MK) < ps * whole_M1
    is_enough_M = ((ks <= num) | ((ks == num_all) & (running_MK[:, -1:] >= ps * whole_M1))).squeeze(
        1
    )
    if num == num_all:
        is_enough_M.fill_(True)
    weights_MK = torch.where(is_in_MK, kept_MK, 0.0)
    # In the order of ids, so that two that are as good as equal may change places unnoticed.
    ids_MK, order_MK = found.indices.sort(dim=-1)
    return ids_MK, weights_MK.gather(1, order_MK), is_enough_M


def _first_above(totals_MK: Tensor, target_M: Tensor) -> Tensor:
    """Where a running total first exceeds the target; rounding never leads beyond the last."""
    highest_M1 = totals_MK[:, -1:]
    target_M1 = torch.minimum(target_M.unsqueeze(1), highest_M1 * (1.0 - 1e-12))
    place_M1 = torch.searchsorted(totals_MK, target_M1, right=True)
    return place_M1.squeeze(1).clamp_(max=totals_MK.shape[1] - 1)


def _reduce_blocks(values_MV: Tensor, reduction: str) -> Tensor:
    """The sums, or the largest, of blocks of a row; the last block may be short."""
    num_all = values_MV.shape[1]
    num_whole = num_all // _BLOCK_SIZE * _BLOCK_SIZE
    whole = values_MV[:, :num_whole].unflatten(1, (-1, _BLOCK_SIZE))
    parts = [getattr(whole, reduction)(dim=-1)] if num_whole else []
    if num_whole < num_all:
        parts.append(getattr(values_MV[:, num_whole:], reduction)(dim=-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _gather_block(values_MV: Tensor, block_M: Tensor, filler: float) -> tuple[Tensor, Tensor]:
    """The ids and values of one block of each row."""
    num_all = values_MV.shape[1]
    ids = block_M[:, None] * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=values_MV.device)
    inside = values_MV.gather(1, ids.clamp(max=num_all - 1))
    if num_all % _BLOCK_SIZE:
        inside = inside.masked_fill(ids >= num_all, filler)
    return ids, inside
