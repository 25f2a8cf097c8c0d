"""Samples tokens from logits with temperature, top-k and top-p, and reproducible random numbers.

Shape letters: M rows, V vocabulary, B blocks of a row, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.sampling.request import SampleSpec

_UINT64_MASK = (1 << 64) - 1
#: The stream of alternative prompt tokens; no sequence has this index.
PROMPT_STREAM = _UINT64_MASK
#: The number of random numbers generated at once.
_BUFFER_SIZE = 64


class RandomStream:
    """Random numbers that depend only on a seed, a stream and their index in it."""

    def __init__(self, seed: int, stream: int, *, num_skipped: int = 0) -> None:
        key = np.array([seed & _UINT64_MASK, stream & _UINT64_MASK], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._generator.random(num_skipped)
        self._buffer: list[float] = []

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        if not self._buffer:
            self._buffer = self._generator.random(_BUFFER_SIZE).tolist()
            self._buffer.reverse()
        return self._buffer.pop()

    def uniform_array(self, *shape: int) -> npt.NDArray[np.float64]:
        """An array of numbers in [0, 1)."""
        return self._generator.random(shape)


_BLOCK_SIZE = 128
#: The numbers of candidates that top-p tries first; few rows need more, and sorting all is slow.
_FIRST_CANDIDATES = (64, 1024)
#: Lower temperatures are practically greedy; float32 can still divide by this one.
_MIN_TEMPERATURE = 1e-30
#: Below this, logits are shifted to a maximum of 0 before the division.
_LOW_TEMPERATURE = 1e-3


#: No row has a grammar.
NO_MASKS: Mapping[int, npt.NDArray[np.bool_]] = MappingProxyType({})


class SampledTokens(NamedTuple):
    """The sampled token of each row."""

    tokens: list[int]
    logprobs: list[float]
    """After temperature and before top-k and top-p; the model's own for greedy rows."""
    topk_ids: npt.NDArray[np.int32] | None
    topk_logprobs: npt.NDArray[np.float32] | None
    """The most likely tokens, with the largest `num_topk` of all rows as columns."""

    def topk_for_row(
        self, row: int, k: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """A row's top-k tokens; None if k is 0.

        Returns copies, because views would keep all rows in memory.
        """
        if not k or self.topk_ids is None or self.topk_logprobs is None:
            return None
        return self.topk_ids[row, :k].copy(), self.topk_logprobs[row, :k].copy()


class SamplingSettings:
    """The sampling parameters of the rows of a batch, as tensors."""

    def __init__(self, specs: Sequence[SampleSpec], device: torch.device) -> None:
        temperatures = np.array([spec.temperature for spec in specs])
        is_greedy = temperatures == 0.0
        divisors = np.where(is_greedy, 1.0, np.maximum(temperatures, _MIN_TEMPERATURE))
        self.divisors_M1 = None
        if (divisors != 1.0).any():
            self.divisors_M1 = torch.tensor(divisors, dtype=torch.float32, device=device)[:, None]
        self.has_low_temperature = bool((divisors < _LOW_TEMPERATURE).any())
        self.has_greedy = bool(is_greedy.any())
        self.has_random = not is_greedy.all()
        self.is_greedy_M = torch.tensor(is_greedy, device=device)
        truncated = [
            row
            for row, spec in enumerate(specs)
            if spec.temperature > 0.0 and (spec.top_k or spec.top_p < 1.0)
        ]
        self.truncated_rows = torch.tensor(truncated, dtype=torch.long, device=device)
        self.truncations = [(specs[row].top_k, specs[row].top_p) for row in truncated]
        self.num_topk = max(spec.num_topk for spec in specs)
        self.specs = specs
        self.grammar_rows = [row for row, spec in enumerate(specs) if spec.grammar is not None]


def sample_tokens(
    logits_MV: Tensor,
    settings: SamplingSettings,
    uniforms_M: npt.NDArray[np.float64],
    masks: Mapping[int, npt.NDArray[np.bool_]] = NO_MASKS,
) -> SampledTokens:
    """Sample one token for each row; modifies the logits.

    `masks` has the allowed tokens of rows with a grammar. Reported log-probabilities are those
    without the mask.
    """
    logits_MV = logits_MV.float()
    masked = _sample_masked(logits_MV, settings, uniforms_M, masks) if masks else None
    _apply_temperature(logits_MV, settings)
    probs_MV = torch.softmax(logits_MV, dim=-1)
    tokens_M = _select_tokens(logits_MV, probs_MV, settings, uniforms_M)
    if masked is not None:
        tokens_M[masked.rows] = masked.tokens_M
    tokens_M1 = tokens_M.unsqueeze(1)
    logprobs_M = probs_MV.gather(1, tokens_M1).squeeze(1).double().log()
    if masked is not None:
        # The probability of an allowed token may be too small for float32.
        logprobs_MV = logits_MV[masked.rows].double().log_softmax(dim=-1)
        logprobs_M[masked.rows] = logprobs_MV.gather(1, tokens_M1[masked.rows]).squeeze(1)
    logprobs_M1 = logprobs_M.unsqueeze(1)
    ids, values = None, None
    if settings.num_topk:
        logsumexp_M1 = logits_MV.gather(1, tokens_M1).double() - logprobs_M1
        topk = logits_MV.topk(settings.num_topk, dim=-1)
        ids = topk.indices.cpu().numpy().astype(np.int32)
        # The sampled token has the same value in both results; rounding could differ.
        scores = (topk.values.double() - logsumexp_M1).float()
        chosen = torch.where(topk.indices == tokens_M1, logprobs_M1.float(), scores)
        values = chosen.cpu().numpy()
    return SampledTokens(tokens_M.tolist(), logprobs_M.float().tolist(), ids, values)


class _MaskedTokens(NamedTuple):
    rows: Tensor
    tokens_M: Tensor


def _sample_masked(
    logits_MV: Tensor,
    settings: SamplingSettings,
    uniforms_M: npt.NDArray[np.float64],
    masks: Mapping[int, npt.NDArray[np.bool_]],
) -> _MaskedTokens:
    """Sample rows whose tokens are restricted; copies their logits."""
    rows = list(masks)
    allowed_MV = torch.from_numpy(np.stack(list(masks.values()))).to(logits_MV.device)
    masked_MV = logits_MV[rows].masked_fill_(~allowed_MV, float("-inf"))
    own = SamplingSettings([settings.specs[row] for row in rows], logits_MV.device)
    _apply_temperature(masked_MV, own)
    probs_MV = torch.softmax(masked_MV, dim=-1)
    tokens_M = _select_tokens(masked_MV, probs_MV, own, uniforms_M[rows])
    return _MaskedTokens(torch.tensor(rows, device=logits_MV.device), tokens_M)


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
    uniforms = torch.from_numpy(uniforms_M).to(logits_MV.device)
    tokens_M = draw_tokens(probs_MV, uniforms)
    if settings.truncations:
        rows = settings.truncated_rows
        tokens_M[rows] = draw_truncated(probs_MV[rows], settings.truncations, uniforms[rows])
    if settings.has_greedy:
        tokens_M = torch.where(settings.is_greedy_M, greedy(logits_MV), tokens_M)
    return tokens_M


def greedy(logits_MV: Tensor) -> Tensor:
    """The most likely token of each row; the lowest id among equals."""
    # `amax` over blocks is much faster than `argmax` over the row.
    best_MB = _reduce_blocks(logits_MV, "amax")
    block_M = best_MB.argmax(dim=-1)
    ids, inside = _gather_block(logits_MV, block_M, float("-inf"))
    tokens_M = ids.gather(1, inside.argmax(dim=-1, keepdim=True)).squeeze(1)
    return tokens_M.clamp_(max=logits_MV.shape[1] - 1)


def draw_tokens(weights_MV: Tensor, uniforms_M: Tensor) -> Tensor:
    """Draw a token for each row in proportion to its weight, with a number in [0, 1) per row."""
    totals_MB = _reduce_blocks(weights_MV, "sum").double().cumsum(dim=-1)
    target_M = uniforms_M * totals_MB[:, -1]
    block_M = _first_above(totals_MB, target_M)
    before_MB = torch.nn.functional.pad(totals_MB, (1, 0))
    target_M = target_M - before_MB.gather(1, block_M.unsqueeze(1)).squeeze(1)
    ids, inside = _gather_block(weights_MV, block_M, 0.0)
    index_M = _first_above(inside.double().cumsum(dim=-1), target_M)
    tokens_M = ids.gather(1, index_M.unsqueeze(1)).squeeze(1)
    # NaN weights give an arbitrary index; the caller checks the log-probabilities.
    return tokens_M.clamp_(max=weights_MV.shape[1] - 1)


def draw_truncated(
    probs_MV: Tensor, truncations: Sequence[tuple[int, float]], uniforms_M: Tensor
) -> Tensor:
    """Draw a token for each row after top-k, then top-p."""
    tokens_M = torch.empty(len(truncations), dtype=torch.long, device=probs_MV.device)
    remaining = list(range(len(truncations)))
    for num in (*_FIRST_CANDIDATES, probs_MV.shape[1]):
        if not remaining:
            break
        rows = torch.tensor(remaining, device=probs_MV.device)
        ids_MK, weights_MK, is_enough_M = _truncated_candidates(
            probs_MV[rows], [truncations[row] for row in remaining], num
        )
        index_M1 = _first_above(
            weights_MK.cumsum(dim=-1), uniforms_M[rows] * weights_MK.sum(dim=-1)
        ).unsqueeze(1)
        tokens_M[rows] = ids_MK.gather(1, index_M1).squeeze(1)
        remaining = [
            row
            for row, is_enough in zip(remaining, is_enough_M.tolist(), strict=True)
            if not is_enough
        ]
    return tokens_M


def _truncated_candidates(
    probs_MV: Tensor, truncations: Sequence[tuple[int, float]], num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `num` most likely tokens by id, their truncated weights, and whether they suffice."""
    num_all = probs_MV.shape[1]
    num = min(num, num_all)
    topk = probs_MV.topk(num, dim=-1)
    probs_MK = topk.values.double()
    ks = torch.tensor([k or num_all for k, _ in truncations], device=probs_MV.device)[:, None]
    ps = torch.tensor([p for _, p in truncations], dtype=torch.float64, device=probs_MV.device)[
        :, None
    ]
    order = torch.arange(num, device=probs_MV.device)
    kept_MK = torch.where(order < ks, probs_MK, 0.0)
    # The total of all tokens without top-k, or of the top k.
    total_M1 = torch.where(
        ks < num_all,
        kept_MK.sum(-1, keepdim=True),
        probs_MV.sum(-1, dtype=torch.float64)[:, None],
    )
    cumulative_MK = kept_MK.cumsum(dim=-1)
    # A token is kept if those before it do not reach top_p, so the first is always kept.
    is_in_MK = (cumulative_MK - kept_MK) < ps * total_M1
    is_enough_M = (
        (ks <= num) | ((ks == num_all) & (cumulative_MK[:, -1:] >= ps * total_M1))
    ).squeeze(1)
    if num == num_all:
        is_enough_M.fill_(True)
    weights_MK = torch.where(is_in_MK, kept_MK, 0.0)
    # Ordered by id, so that tiny differences between nearly equal tokens do not change the draw.
    ids_MK, order_MK = topk.indices.sort(dim=-1)
    return ids_MK, weights_MK.gather(1, order_MK), is_enough_M


def _first_above(totals_MK: Tensor, target_M: Tensor) -> Tensor:
    """The index where a cumulative sum first exceeds the target; never beyond the last."""
    highest_M1 = totals_MK[:, -1:]
    target_M1 = torch.minimum(target_M.unsqueeze(1), highest_M1 * (1.0 - 1e-12))
    index_M1 = torch.searchsorted(totals_MK, target_M1, right=True)
    return index_M1.squeeze(1).clamp_(max=totals_MK.shape[1] - 1)


def _reduce_blocks(values_MV: Tensor, reduction: str) -> Tensor:
    """Reduce each block of a row with "sum" or "amax"; the last block may be shorter."""
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
