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

from tinkex.engine.sampling.request import PromptLogprobsSpec, SampleSpec
from tinkex.engine.sampling.token_sampler import (
    PROMPT_STREAM,
    RandomStream,
    SamplingSettings,
    sample_tokens,
)
from tinkex.types import PromptAltTokens, SampledSequence, SampleResponse, TensorData
from tinkex.types.sampling import FILLER_LOGPROB, TopkLogprobs

Floats = npt.NDArray[np.float32]
LogitsFunction = Callable[[Tensor], Tensor]

#: The most memory for logits at a time; more fits no cache.
_LOGITS_BYTES = 16 << 20


class PromptLogprobs:
    """Filled in while the prompt is read, from its hidden states."""

    def __init__(self, spec: SampleSpec, prompt_spec: PromptLogprobsSpec) -> None:
        num, k = len(spec.prompt), prompt_spec.num_alternatives
        self._spec, self._prompt_spec = spec, prompt_spec
        self._logprobs = np.full(num, np.nan, dtype=np.float32)
        self._topk_ids = np.zeros((num, prompt_spec.num_topk), dtype=np.int32)
        self._topk = np.full((num, prompt_spec.num_topk), FILLER_LOGPROB, dtype=np.float32)
        self._alternatives = np.zeros((num - 1, k), dtype=np.int64)
        self._alternative_logprobs = np.zeros((num - 1, k), dtype=np.float32)
        self._uniforms = RandomStream(spec.seed, PROMPT_STREAM).uniform_array(num - 1, k)
        self._target_rows, self._targets = _parse_targets(prompt_spec.targets)
        self._target_logprobs = np.zeros(len(self._targets), dtype=np.float32)

    def add_hidden_states(
        self, start: int, hidden_MD: Tensor, compute_logits: LogitsFunction, vocab_size: int
    ) -> None:
        """Take in the hidden states of tokens from `start` on."""
        first = max(start, self._prompt_spec.first_position)
        # The last token's row says what follows the prompt.
        stop = min(start + len(hidden_MD), len(self._spec.prompt) - 1)
        step = max(1, _LOGITS_BYTES // (4 * vocab_size))
        for at in range(first, stop, step):
            end = min(at + step, stop)
            self._process_rows(at, end, compute_logits(hidden_MD[at - start : end - start]).float())

    def build_response(self, sequences: Many[SampledSequence], num_cached: int) -> SampleResponse:
        """The answer, with what was asked about the prompt."""
        about, wanted = self._prompt_spec, self._prompt_spec.targets
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

    def _process_rows(self, at: int, end: int, logits_MV: Tensor) -> None:
        total_M1 = logits_MV.logsumexp(dim=-1, keepdim=True)
        scored = max(at, self._prompt_spec.first_scored - 1)
        if scored < end:
            mine = slice(scored - at, end - at)
            self._score_tokens(scored, end, logits_MV[mine], total_M1[mine])
        if len(self._targets):
            self._score_targets(at, end, logits_MV, total_M1)
        if self._prompt_spec.num_alternatives:
            self._draw_alternatives(at, end, logits_MV)

    def _score_tokens(self, at: int, end: int, logits_MV: Tensor, total_M1: Tensor) -> None:
        tokens = torch.from_numpy(self._spec.prompt[at + 1 : end + 1]).to(logits_MV.device)
        scores = logits_MV.gather(1, tokens[:, None]) - total_M1
        self._logprobs[at + 1 : end + 1] = scores.squeeze(1).cpu().numpy()
        if self._prompt_spec.num_topk:
            found = logits_MV.topk(self._prompt_spec.num_topk, dim=-1)
            self._topk_ids[at + 1 : end + 1] = found.indices.cpu().numpy()
            self._topk[at + 1 : end + 1] = (found.values - total_M1).cpu().numpy()

    def _score_targets(self, at: int, end: int, logits_MV: Tensor, total_M1: Tensor) -> None:
        first, last = np.searchsorted(self._target_rows, (at, end))
        rows = torch.from_numpy(self._target_rows[first:last] - at).to(logits_MV.device)
        ids = self._targets[first:last]
        columns = torch.from_numpy(np.maximum(ids, 0)).to(logits_MV.device)
        scores = (logits_MV[rows, columns] - total_M1[rows, 0]).cpu().numpy()
        self._target_logprobs[first:last] = np.where(ids < 0, 0.0, scores)

    def _draw_alternatives(self, at: int, end: int, logits_MV: Tensor) -> None:
        ask = replace(self._spec, top_k=0, top_p=1.0, num_topk=0)
        settings = SamplingSettings([ask] * (end - at), logits_MV.device)
        for column in range(self._prompt_spec.num_alternatives):
            numbers = np.ascontiguousarray(self._uniforms[at:end, column])
            chosen = sample_tokens(logits_MV.clone(), settings, numbers)
            self._alternatives[at:end, column] = chosen.tokens
            self._alternative_logprobs[at:end, column] = chosen.logprobs


def _parse_targets(
    targets: TensorData | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The row of each cell that is asked for, and its token."""
    if targets is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    crow = targets.crow_array
    per_row = targets.shape[1] if crow is None else np.diff(crow)
    rows = np.repeat(np.arange(targets.shape[0]), per_row)
    return rows, targets.array.ravel().astype(np.int64)
