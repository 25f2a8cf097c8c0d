"""Target log-probabilities and their gradient w.r.t. hidden states, without full logits.

Logits are computed for one chunk of rows at a time. The backward pass visits only rows that the
loss depends on, so prompt rows cost nothing there.

Shape letters: T rows, M rows of a chunk, m rows of one adapter, P (row, target) pairs, p pairs of a
chunk, D hidden width, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.forward_context import SavedLora
from tinkex.nn.lm_head import LMHead
from tinkex.nn.lora_training import SegmentedLora

Indices: TypeAlias = npt.NDArray[np.int64]

#: Minimum chunk size in rows, for efficient matrix products; small vocabularies get more rows.
_CHUNK_ROWS = 256
_CHUNK_BYTES = 32 * 1024 * 1024
#: Log-probabilities are float32 for models of any dtype.
_ITEM_BYTES = 4


class _ScoredRows(NamedTuple):
    """Log-probabilities of some rows, and what their backward needs."""

    rows: Indices
    """Indices in the hidden states, ascending."""
    logprobs_MV: Tensor
    lse_M1: Tensor | None
    """Logits minus log-probabilities; only with a softcap."""
    lora: SegmentedLora
    lora_saved: SavedLora
    """What the backward of the head's adapters needs: (m, R) of each segment."""


class TargetLogprobs:
    """Log-probabilities of (row, target) pairs, and their backward to the hidden states.

    A row has any number of pairs; `rows_P` ascends. Log-probabilities of the whole vocabulary are
    saved from `logprobs` for `backward` within `max_logits_bytes`, unless `save_logprobs` is false.
    The backward pass recomputes the others where it needs them.
    """

    def __init__(
        self,
        head: LMHead,
        hidden_TD: Tensor,
        lora: SegmentedLora,
        rows_P: Indices,
        targets_P: Indices,
        *,
        max_logits_bytes: int,
        save_logprobs: bool = True,
    ) -> None:
        self._head = head
        self._hidden_TD = hidden_TD.detach()
        self._lora = lora
        self._rows_P = np.asarray(rows_P, dtype=np.int64)
        self._targets_P = torch.as_tensor(targets_P, dtype=torch.int64, device=hidden_TD.device)
        row_bytes = head.vocab_size * _ITEM_BYTES
        max_rows = max_logits_bytes // row_bytes
        self._max_saved_rows = max_rows if save_logprobs else 0
        self._max_chunk_rows = max(1, min(max_rows, max(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes)))
        self._saved: _ScoredRows | None = None
        self._scratch: Tensor | None = None

    @torch.no_grad()
    def logprobs(self, needs_grad_P: npt.NDArray[np.bool_] | None = None) -> Tensor:
        """Return the log-probability of each pair's target: (P,), float32.

        `needs_grad_P` marks pairs whose gradient may be nonzero; only their rows are saved.
        """
        logprobs_P = self._new_float32(len(self._rows_P))
        grad_rows = self._rows_P if needs_grad_P is None else self._rows_P[needs_grad_P]
        saved_rows = np.unique(grad_rows)[: self._max_saved_rows]
        self._save_rows(saved_rows, logprobs_P)
        for chunk in self._chunks(np.setdiff1d(self._rows_P, saved_rows)):
            self._score_rows(chunk, logprobs_P)
        self._scratch = None
        return logprobs_P

    @torch.no_grad()
    def backward(self, grad_P: Tensor) -> Tensor:
        """Return the hidden states' gradient (T, D), given the loss gradient per log-probability.

        Accumulates the gradients of the head's adapters. Consumes what `logprobs` saved.
        """
        dhidden_TD = torch.zeros_like(self._hidden_TD)
        grad_P, needed = self._rows_with_grad(grad_P)
        saved, self._saved = self._saved, None
        if saved is not None:
            for chunk in self._chunks(np.intersect1d(needed, saved.rows)):
                self._backward_rows(self._select_saved(saved, chunk), grad_P, dhidden_TD)
            needed = np.setdiff1d(needed, saved.rows)
            del saved
        for chunk in self._chunks(needed):
            self._backward_rows(self._score_rows(chunk), grad_P, dhidden_TD)
        self._scratch = None
        return dhidden_TD

    @torch.no_grad()
    def logprobs_and_grad(self, grad_P: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both in one pass for a gradient that is known in advance."""
        logprobs_P, dhidden_TD = (
            self._new_float32(len(self._rows_P)),
            torch.zeros_like(self._hidden_TD),
        )
        grad_P, needed = self._rows_with_grad(grad_P)
        for chunk in self._chunks(needed):
            self._backward_rows(self._score_rows(chunk, logprobs_P), grad_P, dhidden_TD)
        for chunk in self._chunks(np.setdiff1d(self._rows_P, needed)):
            self._score_rows(chunk, logprobs_P)
        self._scratch = None
        return logprobs_P, dhidden_TD

    # --- which rows ---------------------------------------------------------------------------
    def _rows_with_grad(self, grad_P: Tensor) -> tuple[Tensor, Indices]:
        """The gradient on the device of the hidden states, and the rows where it is nonzero."""
        is_needed_P = grad_P.detach().cpu().numpy() != 0.0
        grad_P = grad_P.to(self._hidden_TD.device, torch.float32)
        return grad_P, np.unique(self._rows_P[is_needed_P])

    def _chunks(self, rows: Indices) -> Iterator[Indices]:
        """Split rows into chunks of about equal size."""
        num_chunks = -(-len(rows) // self._max_chunk_rows)
        yield from np.array_split(rows, num_chunks) if num_chunks else ()

    def _pairs_of_rows(self, rows: Indices) -> tuple[Tensor, Tensor]:
        """Indices of the pairs of some rows, and the index of each pair's row among them."""
        start = int(np.searchsorted(self._rows_P, rows[0], side="left"))
        stop = int(np.searchsorted(self._rows_P, rows[-1], side="right"))
        rows_p = self._rows_P[start:stop]
        at_p = np.searchsorted(rows, rows_p)
        is_of_these_p = rows[at_p] == rows_p
        pairs_p = start + np.flatnonzero(is_of_these_p)
        return self._to_device(pairs_p), self._to_device(at_p[is_of_these_p])

    def _to_device(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices).to(self._hidden_TD.device)

    # --- memory -------------------------------------------------------------------------------
    def _new_float32(self, *shape: int) -> Tensor:
        return self._hidden_TD.new_empty(shape, dtype=torch.float32)

    def _scratch_logits(self, num_rows: int) -> Tensor:
        """Return the buffer that chunks share; new memory would cost page faults."""
        if self._scratch is None or len(self._scratch) < num_rows:
            self._scratch = None
            self._scratch = self._new_float32(num_rows, self._head.vocab_size)
        return self._scratch[:num_rows]

    def _save_rows(self, rows: Indices, logprobs_P: Tensor) -> None:
        """Score rows and save the result for `backward`."""
        if not len(rows):
            return
        saved_MV = self._new_float32(len(rows), self._head.vocab_size)
        parts: list[_ScoredRows] = []
        start = 0
        for chunk in self._chunks(rows):
            parts.append(self._score_rows(chunk, logprobs_P, saved_MV[start : start + len(chunk)]))
            start += len(chunk)
        self._saved = _ScoredRows(
            rows=rows,
            logprobs_MV=saved_MV,
            lse_M1=_cat_present([part.lse_M1 for part in parts]),
            lora=self._lora.select_rows(rows),
            lora_saved=[
                _cat_present(lows)
                for lows in zip(*(part.lora_saved for part in parts), strict=True)
            ],
        )

    def _select_saved(self, saved: _ScoredRows, rows: Indices) -> _ScoredRows:
        """Select some of the saved rows."""
        at_M = np.searchsorted(saved.rows, rows)
        out_MV = None if _is_contiguous(at_M) else self._scratch_logits(len(rows))
        return _ScoredRows(
            rows=rows,
            logprobs_MV=_select_rows(saved.logprobs_MV, at_M, out_MV),
            lse_M1=None if saved.lse_M1 is None else _select_rows(saved.lse_M1, at_M),
            lora=saved.lora.select_rows(at_M),
            lora_saved=_select_lora_saved(saved, at_M),
        )

    # --- forward and backward -----------------------------------------------------------------
    def _score_rows(
        self, rows: Indices, logprobs_P: Tensor | None = None, out_MV: Tensor | None = None
    ) -> _ScoredRows:
        """Score rows, in `out_MV` or in the shared buffer that the next chunk overwrites."""
        out_MV = self._scratch_logits(len(rows)) if out_MV is None else out_MV
        is_same = self._hidden_TD.dtype == out_MV.dtype
        lora = self._lora.select_rows(rows)
        logits_MV, lora_saved = self._head.logits(
            _select_rows(self._hidden_TD, rows), lora, out_MV if is_same else None
        )
        if not is_same:
            logits_MV = out_MV.copy_(logits_MV)
        first_logit_M1 = logits_MV[:, :1].clone()
        torch.log_softmax(logits_MV, dim=-1, out=logits_MV)
        if logprobs_P is not None:
            pairs_p, at_p = self._pairs_of_rows(rows)
            logprobs_P[pairs_p] = logits_MV[at_p, self._targets_P[pairs_p]]
        lse_M1 = None if self._head.softcap is None else first_logit_M1 - logits_MV[:, :1]
        return _ScoredRows(rows, logits_MV, lse_M1, lora, lora_saved)

    def _backward_rows(self, scored: _ScoredRows, grad_P: Tensor, dhidden_TD: Tensor) -> None:
        """Write the hidden states' gradient of scored rows; overwrites their log-probabilities."""
        pairs_p, at_p = self._pairs_of_rows(scored.rows)
        grad_p = grad_P[pairs_p]
        sum_M = grad_p.new_zeros(len(scored.rows)).index_put_((at_p,), grad_p, accumulate=True)
        logits_MV = None if scored.lse_M1 is None else scored.logprobs_MV + scored.lse_M1
        # d logprob / d logits = one_hot(target) - softmax.
        dlogits_MV = scored.logprobs_MV.exp_().mul_(sum_M.neg_().unsqueeze(1))
        dlogits_MV.index_put_((at_p, self._targets_P[pairs_p]), grad_p, accumulate=True)
        dhidden_TD[self._to_device(scored.rows)] = self._head.backward(
            _select_rows(self._hidden_TD, scored.rows),
            dlogits_MV.to(self._hidden_TD.dtype),
            logits_MV,
            scored.lora_saved,
            scored.lora,
        )


def _is_contiguous(rows: Indices) -> bool:
    return int(rows[-1] - rows[0]) + 1 == len(rows)


def _select_rows(table: Tensor, rows: Indices, out: Tensor | None = None) -> Tensor:
    """Select ascending rows of a table; a view if they are consecutive."""
    if _is_contiguous(rows):
        return table[rows[0] : rows[-1] + 1]
    return torch.index_select(table, 0, torch.from_numpy(rows).to(table.device), out=out)


def _select_lora_saved(saved: _ScoredRows, at_M: Indices) -> list[Tensor | None]:
    adapter_by_row, _ = saved.lora.adapters_by_row(len(saved.rows))
    selected: list[Tensor | None] = []
    for index, h_mR in enumerate(saved.lora_saved):
        at_m = at_M[adapter_by_row[at_M] == index]
        if h_mR is None or not len(at_m):
            selected.append(None)
        else:
            selected.append(_select_rows(h_mR, at_m - np.argmax(adapter_by_row == index)))
    return selected


def _cat_present(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
