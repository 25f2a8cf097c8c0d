"""Scores prompts: log-probabilities, top-k tokens, target scores and sampled alternatives.

Shape letters: M token positions (r predicts token r + 1), V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

#: Memory for logits at a time; more would not fit into the CPU cache.
_LOGITS_BYTES = 16 << 20


class PromptLogprobs:
    """Collects the requested scores of a prompt during its prefill."""

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
        """Score the hidden states of the tokens from `start` on."""
        first = max(start, self._prompt_spec.first_position)
        # The last position predicts the first sampled token, not a prompt token.
        stop = min(start + len(hidden_MD), len(self._spec.prompt) - 1)
        step = max(1, _LOGITS_BYTES // (4 * vocab_size))
        for begin in range(first, stop, step):
            end = min(begin + step, stop)
            logits_MV = compute_logits(hidden_MD[begin - start : end - start]).float()
            self._process_rows(begin, end, logits_MV)

    def build_response(
        self, sequences: Sequence[SampledSequence], num_cached: int
    ) -> SampleResponse:
        """The response with the sequences and the scores of the prompt."""
        spec, requested = self._prompt_spec, self._prompt_spec.targets
        targets = None
        if requested is not None:
            values = self._target_logprobs.reshape(requested.array.shape)
            targets = TensorData(
                values, "float32", requested.shape, requested.crow_array, requested.col_array
            )
        alternatives = None
        if spec.num_alternatives:
            alternatives = PromptAltTokens(
                TensorData.from_numpy(self._alternatives),
                TensorData.from_numpy(self._alternative_logprobs),
            )
        return SampleResponse(
            sequences,
            self._logprobs if spec.has_logprobs else None,
            TopkLogprobs(self._topk_ids, self._topk) if spec.num_topk else None,
            target_prompt_logprobs=targets,
            prompt_cache_hit_tokens=num_cached,
            prompt_alt_tokens=alternatives,
        )

    def _process_rows(self, begin: int, end: int, logits_MV: Tensor) -> None:
        logsumexp_M1 = logits_MV.logsumexp(dim=-1, keepdim=True)
        first = max(begin, self._prompt_spec.first_scored - 1)
        if first < end:
            rows = slice(first - begin, end - begin)
            self._score_tokens(first, end, logits_MV[rows], logsumexp_M1[rows])
        if len(self._targets):
            self._score_targets(begin, end, logits_MV, logsumexp_M1)
        if self._prompt_spec.num_alternatives:
            self._draw_alternatives(begin, end, logits_MV)

    def _score_tokens(self, begin: int, end: int, logits_MV: Tensor, logsumexp_M1: Tensor) -> None:
        tokens = torch.from_numpy(self._spec.prompt[begin + 1 : end + 1]).to(logits_MV.device)
        scores = logits_MV.gather(1, tokens[:, None]) - logsumexp_M1
        self._logprobs[begin + 1 : end + 1] = scores.squeeze(1).cpu().numpy()
        if self._prompt_spec.num_topk:
            topk = logits_MV.topk(self._prompt_spec.num_topk, dim=-1)
            self._topk_ids[begin + 1 : end + 1] = topk.indices.cpu().numpy()
            self._topk[begin + 1 : end + 1] = (topk.values - logsumexp_M1).cpu().numpy()

    def _score_targets(self, begin: int, end: int, logits_MV: Tensor, logsumexp_M1: Tensor) -> None:
        first, last = np.searchsorted(self._target_rows, (begin, end))
        rows = torch.from_numpy(self._target_rows[first:last] - begin).to(logits_MV.device)
        ids = self._targets[first:last]
        columns = torch.from_numpy(np.maximum(ids, 0)).to(logits_MV.device)
        scores = (logits_MV[rows, columns] - logsumexp_M1[rows, 0]).cpu().numpy()
        self._target_logprobs[first:last] = np.where(ids < 0, 0.0, scores)

    def _draw_alternatives(self, begin: int, end: int, logits_MV: Tensor) -> None:
        spec = replace(self._spec, top_k=0, top_p=1.0, num_topk=0)
        settings = SamplingSettings([spec] * (end - begin), logits_MV.device)
        for column in range(self._prompt_spec.num_alternatives):
            uniforms = np.ascontiguousarray(self._uniforms[begin:end, column])
            sampled = sample_tokens(logits_MV.clone(), settings, uniforms)
            self._alternatives[begin:end, column] = sampled.tokens
            self._alternative_logprobs[begin:end, column] = sampled.logprobs


def _parse_targets(
    targets: TensorData | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The position and token of each requested target."""
    if targets is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    crow = targets.crow_array
    per_row = targets.shape[1] if crow is None else np.diff(crow)
    rows = np.repeat(np.arange(targets.shape[0]), per_row)
    return rows, targets.array.ravel().astype(np.int64)
