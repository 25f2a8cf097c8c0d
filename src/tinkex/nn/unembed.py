"""Log-probabilities of targets, and their pull on hidden states, without the logits of all rows.

Logits are made for a chunk of rows at a time. Going back, only rows that a loss depends on are
visited: a prompt's rows cost nothing there.

Shape letters: T rows, M rows of a chunk, m rows of one adapter, P pairs of (row, target), p pairs
of a chunk, D hidden width, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.nn.head import Head
from tinkex.nn.segments import Segments

Indices: TypeAlias = npt.NDArray[np.int64]

#: A chunk has so many rows, because matrix products of fewer are slow, or more if they are short.
_CHUNK_ROWS = 256
_CHUNK_BYTES = 32 * 1024 * 1024
#: Log-probabilities are float32 whatever the model computes with.
_ITEM_BYTES = 4


class _Rows(NamedTuple):
    """What is known of some rows."""

    rows: Indices
    """Where they are in the hidden states, ascending."""
    logprobs_MV: Tensor
    lse_M1: Tensor | None
    """By how much their logits exceed the log-probabilities; only if there is a softcap."""
    segments: Segments
    low: Sequence[Tensor | None]
    """What the head's adapters need to go back: (m, R) of each segment."""


class Scorer:
    """Scores pairs of (row, target), and pulls on the rows' hidden states.

    A row has any number of pairs; `rows_P` ascends. Log-probabilities of the whole vocabulary are
    kept from `logprobs` to `pull` as far as `max_logits_bytes` goes, unless `is_kept` is false.
    What is not kept is computed again, for the rows that need it.
    """

    def __init__(
        self,
        head: Head,
        hidden_TD: Tensor,
        rows: Segments,
        rows_P: Indices,
        targets_P: Indices,
        *,
        max_logits_bytes: int,
        is_kept: bool = True,
    ) -> None:
        self._head = head
        self._hidden_TD = hidden_TD.detach()
        self._segments = rows
        self._rows_P = np.asarray(rows_P, dtype=np.int64)
        self._targets_P = torch.as_tensor(targets_P, dtype=torch.int64, device=hidden_TD.device)
        row_bytes = head.vocab_size * _ITEM_BYTES
        max_rows = max_logits_bytes // row_bytes
        self._max_kept = max_rows if is_kept else 0
        self._max_chunk = max(1, min(max_rows, max(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes)))
        self._kept: _Rows | None = None
        self._scratch: Tensor | None = None

    @torch.no_grad()
    def logprobs(self, is_wanted_P: npt.NDArray[np.bool_] | None = None) -> Tensor:
        """The log-probability of each pair's target: (P,), float32.

        Memory is spent on rows whose slope may come out other than zero, if those are known.
        """
        logprobs_P = self._new(len(self._rows_P))
        wanted_P = self._rows_P if is_wanted_P is None else self._rows_P[is_wanted_P]
        kept = np.unique(wanted_P)[: self._max_kept]
        self._keep(kept, logprobs_P)
        for chunk in self._cut(np.setdiff1d(self._rows_P, kept)):
            self._score(chunk, logprobs_P)
        self._scratch = None
        return logprobs_P

    @torch.no_grad()
    def pull(self, slope_P: Tensor) -> Tensor:
        """The gradient of the hidden states, from the loss's slope by each log-probability: (T, D).

        Adapters of the head gather theirs. What `logprobs` kept is used up.
        """
        dhidden_TD = torch.zeros_like(self._hidden_TD)
        slope_P, needed = self._needed(slope_P)
        kept, self._kept = self._kept, None
        if kept is not None:
            for chunk in self._cut(np.intersect1d(needed, kept.rows)):
                self._pull(self._picked(kept, chunk), slope_P, dhidden_TD)
            needed = np.setdiff1d(needed, kept.rows)
            del kept
        for chunk in self._cut(needed):
            self._pull(self._score(chunk), slope_P, dhidden_TD)
        self._scratch = None
        return dhidden_TD

    @torch.no_grad()
    def logprobs_and_pull(self, slope_P: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once, for slopes that are known before: nothing is kept or computed again."""
        logprobs_P, dhidden_TD = self._new(len(self._rows_P)), torch.zeros_like(self._hidden_TD)
        slope_P, needed = self._needed(slope_P)
        for chunk in self._cut(needed):
            self._pull(self._score(chunk, logprobs_P), slope_P, dhidden_TD)
        for chunk in self._cut(np.setdiff1d(self._rows_P, needed)):
            self._score(chunk, logprobs_P)
        self._scratch = None
        return logprobs_P, dhidden_TD

    # --- which rows ---------------------------------------------------------------------------
    def _needed(self, slope_P: Tensor) -> tuple[Tensor, Indices]:
        """The slopes where the hidden states are, and the rows that the loss depends on."""
        is_needed_P = slope_P.detach().cpu().numpy() != 0.0
        slope_P = slope_P.to(self._hidden_TD.device, torch.float32)
        return slope_P, np.unique(self._rows_P[is_needed_P])

    def _cut(self, rows: Indices) -> Iterator[Indices]:
        """Rows in chunks of about the same size."""
        num_chunks = -(-len(rows) // self._max_chunk)
        yield from np.array_split(rows, num_chunks) if num_chunks else ()

    def _pairs(self, rows: Indices) -> tuple[Tensor, Tensor]:
        """The pairs of some rows, and which of the rows each is of."""
        start = int(np.searchsorted(self._rows_P, rows[0], side="left"))
        stop = int(np.searchsorted(self._rows_P, rows[-1], side="right"))
        rows_p = self._rows_P[start:stop]
        at_p = np.searchsorted(rows, rows_p)
        is_of_these_p = rows[at_p] == rows_p
        pairs_p = start + np.flatnonzero(is_of_these_p)
        return self._moved(pairs_p), self._moved(at_p[is_of_these_p])

    def _moved(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices).to(self._hidden_TD.device)

    # --- memory -------------------------------------------------------------------------------
    def _new(self, *shape: int) -> Tensor:
        return self._hidden_TD.new_empty(shape, dtype=torch.float32)

    def _borrowed(self, num_rows: int) -> Tensor:
        """Memory for a chunk; chunks share it, because fresh pages cost time."""
        if self._scratch is None or len(self._scratch) < num_rows:
            self._scratch = None
            self._scratch = self._new(num_rows, self._head.vocab_size)
        return self._scratch[:num_rows]

    def _keep(self, rows: Indices, logprobs_P: Tensor) -> None:
        """Score rows, and hold on to what is known of them."""
        if not len(rows):
            return
        kept_MV = self._new(len(rows), self._head.vocab_size)
        parts: list[_Rows] = []
        start = 0
        for chunk in self._cut(rows):
            parts.append(self._score(chunk, logprobs_P, kept_MV[start : start + len(chunk)]))
            start += len(chunk)
        self._kept = _Rows(
            rows=rows,
            logprobs_MV=kept_MV,
            lse_M1=_joined([part.lse_M1 for part in parts]),
            segments=self._segments.selected(rows),
            low=[_joined(lows) for lows in zip(*(part.low for part in parts), strict=True)],
        )

    def _picked(self, kept: _Rows, rows: Indices) -> _Rows:
        """Some of the rows that are kept."""
        at_M = np.searchsorted(kept.rows, rows)
        out_MV = None if _is_run(at_M) else self._borrowed(len(rows))
        return _Rows(
            rows=rows,
            logprobs_MV=_take(kept.logprobs_MV, at_M, out_MV),
            lse_M1=None if kept.lse_M1 is None else _take(kept.lse_M1, at_M),
            segments=kept.segments.selected(at_M),
            low=_take_low(kept, at_M),
        )

    # --- there and back -----------------------------------------------------------------------
    def _score(
        self, rows: Indices, logprobs_P: Tensor | None = None, out_MV: Tensor | None = None
    ) -> _Rows:
        """Score rows, in memory that the next chunk takes over unless other memory is given."""
        out_MV = self._borrowed(len(rows)) if out_MV is None else out_MV
        is_same = self._hidden_TD.dtype == out_MV.dtype
        segments = self._segments.selected(rows)
        logits_MV, low = self._head.logits(
            _take(self._hidden_TD, rows), segments, out_MV if is_same else None
        )
        if not is_same:
            logits_MV = out_MV.copy_(logits_MV)
        any_M1 = logits_MV[:, :1].clone()
        torch.log_softmax(logits_MV, dim=-1, out=logits_MV)
        if logprobs_P is not None:
            pairs_p, at_p = self._pairs(rows)
            logprobs_P[pairs_p] = logits_MV[at_p, self._targets_P[pairs_p]]
        lse_M1 = None if self._head.softcap is None else any_M1 - logits_MV[:, :1]
        return _Rows(rows, logits_MV, lse_M1, segments, low)

    def _pull(self, known: _Rows, slope_P: Tensor, dhidden_TD: Tensor) -> None:
        """Pull on rows; their log-probabilities are used up."""
        pairs_p, at_p = self._pairs(known.rows)
        slope_p = slope_P[pairs_p]
        sum_M = slope_p.new_zeros(len(known.rows)).index_put_((at_p,), slope_p, accumulate=True)
        logits_MV = None if known.lse_M1 is None else known.logprobs_MV + known.lse_M1
        # A log-probability's slope by the logits is 1 at its target, less the probabilities.
        dlogits_MV = known.logprobs_MV.exp_().mul_(sum_M.neg_().unsqueeze(1))
        dlogits_MV.index_put_((at_p, self._targets_P[pairs_p]), slope_p, accumulate=True)
        dhidden_TD[self._moved(known.rows)] = self._head.pull(
            _take(self._hidden_TD, known.rows),
            dlogits_MV.to(self._hidden_TD.dtype),
            logits_MV,
            known.low,
            known.segments,
        )


def _is_run(rows: Indices) -> bool:
    return int(rows[-1] - rows[0]) + 1 == len(rows)


def _take(table: Tensor, rows: Indices, out: Tensor | None = None) -> Tensor:
    """Rows of a table, which ascend; a view if they follow each other."""
    if _is_run(rows):
        return table[rows[0] : rows[-1] + 1]
    return torch.index_select(table, 0, torch.from_numpy(rows).to(table.device), out=out)


def _take_low(kept: _Rows, at_M: Indices) -> list[Tensor | None]:
    owners, _ = kept.segments.owners(len(kept.rows))
    taken: list[Tensor | None] = []
    for number, low_mR in enumerate(kept.low):
        at_m = at_M[owners[at_M] == number]
        if low_mR is None or not len(at_m):
            taken.append(None)
        else:
            taken.append(_take(low_mR, at_m - np.argmax(owners == number)))
    return taken


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None
