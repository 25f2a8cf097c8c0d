"""What is asked about a prompt: scores of its tokens, the likeliest ones, and others instead.

Shape letters: M rows (row r says what follows token r), V vocabulary, D hidden width, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.sampling.asks import Ask, PromptAsk
from tinkex.engine.sampling.dice import PROMPT_STREAM, Dice
from tinkex.engine.sampling.sampler import Settings, choose
from tinkex.types import PromptAltTokens, SampledSequence, SampleResponse, TensorData
from tinkex.types.sampling import FILLER_LOGPROB, TopkLogprobs

Floats = npt.NDArray[np.float32]
LogitsOf = Callable[[Tensor], Tensor]

#: The most memory for logits at a time; more fits no cache.
_LOGITS_BYTES = 16 << 20


class PromptScores:
    """Filled in while the prompt is read, from its hidden states."""

    def __init__(self, ask: Ask, about: PromptAsk) -> None:
        num, k = len(ask.prompt), about.num_alternatives
        self._ask, self._about = ask, about
        self._logprobs = np.full(num, np.nan, dtype=np.float32)
        self._topk_ids = np.zeros((num, about.num_topk), dtype=np.int32)
        self._topk = np.full((num, about.num_topk), FILLER_LOGPROB, dtype=np.float32)
        self._alternatives = np.zeros((num - 1, k), dtype=np.int64)
        self._alternative_logprobs = np.zeros((num - 1, k), dtype=np.float32)
        self._numbers = Dice(ask.seed, PROMPT_STREAM).throw_many(num - 1, k)
        self._target_rows, self._targets = _read_targets(about.targets)
        self._target_logprobs = np.zeros(len(self._targets), dtype=np.float32)

    def read(self, start: int, hidden_MD: Tensor, logits_of: LogitsOf, vocab_size: int) -> None:
        """Take in the hidden states of tokens from `start` on."""
        first = max(start, self._about.first_row)
        # The last token's row says what follows the prompt.
        stop = min(start + len(hidden_MD), len(self._ask.prompt) - 1)
        step = max(1, _LOGITS_BYTES // (4 * vocab_size))
        for at in range(first, stop, step):
            end = min(at + step, stop)
            self._read_rows(at, end, logits_of(hidden_MD[at - start : end - start]).float())

    def response(self, sequences: Many[SampledSequence], num_cached: int) -> SampleResponse:
        """The answer, with what was asked about the prompt."""
        about, wanted = self._about, self._about.targets
        targets = None
        if wanted is not None:
            values = self._target_logprobs.reshape(wanted.array.shape)
            targets = TensorData(
                values, "float32", wanted.shape, wanted.crow_array, wanted.col_array
            )
        alternatives = None
        if about.num_alternatives:
            alternatives = PromptAltTokens(
                TensorData.from_numpy(self._alternatives),
                TensorData.from_numpy(self._alternative_logprobs),
            )
        return SampleResponse(
            sequences,
            self._logprobs if about.has_logprobs else None,
            TopkLogprobs(self._topk_ids, self._topk) if about.num_topk else None,
            target_prompt_logprobs=targets,
            prompt_cache_hit_tokens=num_cached,
            prompt_alt_tokens=alternatives,
        )

    def _read_rows(self, at: int, end: int, logits_MV: Tensor) -> None:
        total_M1 = logits_MV.logsumexp(dim=-1, keepdim=True)
        scored = max(at, self._about.first - 1)
        if scored < end:
            mine = slice(scored - at, end - at)
            self._score(scored, end, logits_MV[mine], total_M1[mine])
        if len(self._targets):
            self._score_targets(at, end, logits_MV, total_M1)
        if self._about.num_alternatives:
            self._draw(at, end, logits_MV)

    def _score(self, at: int, end: int, logits_MV: Tensor, total_M1: Tensor) -> None:
        tokens = torch.from_numpy(self._ask.prompt[at + 1 : end + 1]).to(logits_MV.device)
        scores = logits_MV.gather(1, tokens[:, None]) - total_M1
        self._logprobs[at + 1 : end + 1] = scores.squeeze(1).cpu().numpy()
        if self._about.num_topk:
            found = logits_MV.topk(self._about.num_topk, dim=-1)
            self._topk_ids[at + 1 : end + 1] = found.indices.cpu().numpy()
            self._topk[at + 1 : end + 1] = (found.values - total_M1).cpu().numpy()

    def _score_targets(self, at: int, end: int, logits_MV: Tensor, total_M1: Tensor) -> None:
        first, last = np.searchsorted(self._target_rows, (at, end))
        rows = torch.from_numpy(self._target_rows[first:last] - at).to(logits_MV.device)
        ids = self._targets[first:last]
        columns = torch.from_numpy(np.maximum(ids, 0)).to(logits_MV.device)
        scores = (logits_MV[rows, columns] - total_M1[rows, 0]).cpu().numpy()
        self._target_logprobs[first:last] = np.where(ids < 0, 0.0, scores)

    def _draw(self, at: int, end: int, logits_MV: Tensor) -> None:
        ask = replace(self._ask, top_k=0, top_p=1.0, num_topk=0)
        settings = Settings([ask] * (end - at), logits_MV.device)
        for column in range(self._about.num_alternatives):
            numbers = np.ascontiguousarray(self._numbers[at:end, column])
            chosen = choose(logits_MV.clone(), settings, numbers)
            self._alternatives[at:end, column] = chosen.tokens
            self._alternative_logprobs[at:end, column] = chosen.logprobs


def _read_targets(
    wanted: TensorData | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The row of each cell that is asked for, and its token."""
    if wanted is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    crow = wanted.crow_array
    per_row = wanted.shape[1] if crow is None else np.diff(crow)
    rows = np.repeat(np.arange(wanted.shape[0]), per_row)
    return rows, wanted.array.ravel().astype(np.int64)
