"""Sampling parameters, requests and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from tinkex.errors import InvalidInput
from tinkex.types.base import Message
from tinkex.types.inputs import ModelInput
from tinkex.types.optimizers import check_range
from tinkex.types.tensors import TensorData

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float32]
    Tokens: TypeAlias = npt.NDArray[np.int32]

StopReason: TypeAlias = Literal["length", "stop"]
TopkRow: TypeAlias = list[tuple[int, float]]

#: Padding of top-k matrices, together with token 0.
FILLER_LOGPROB = -99999.0


class SamplingParams(Message):
    """How tokens are sampled."""

    max_tokens: int | None = None
    """Maximum number of tokens; None means the server's default."""
    seed: int | None = None
    """Random seed."""
    stop: str | Sequence[str | int] | None = None
    """Stop sequences: a text, texts, or token ids. None stops at the end-of-text token; an empty
    list samples until `max_tokens`."""
    temperature: float = 1
    """Sampling temperature; 0 means greedy decoding."""
    top_k: int = -1
    """Sample only from the k most likely tokens; -1 means no limit."""
    top_p: float = 1
    """Nucleus sampling: sample from the most likely tokens with this total probability."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidInput(
                f"SamplingParams.max_tokens is {self.max_tokens}; expected at least 1, or None"
            )
        check_range("SamplingParams.temperature", self.temperature, at_least=0.0)
        check_range("SamplingParams.top_p", self.top_p, above=0.0, at_most=1.0)
        if self.top_k != -1 and self.top_k < 1:
            raise InvalidInput(
                f"SamplingParams.top_k is {self.top_k}; expected at least 1, or -1 for no limit"
            )
        if self.stop is not None and len({type(stop) for stop in self.stop}) > 1:
            raise InvalidInput(f"SamplingParams.stop mixes texts and token ids: {self.stop!r:.80}")


class SampleRequest(Message):
    """Request samples of a prompt."""

    num_samples: int = 1
    """Number of sequences."""
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    """The base model, without a sampling session or path."""
    model_path: str | None = None
    """The tinker:// path of the weights to sample from."""
    sampling_session_id: str | None = None
    """The sampling session; requires `seq_id`."""
    seq_id: int | None = None
    """The sequence number within the sampling session."""
    prompt_logprobs: bool | None = None
    """Return log-probabilities of the prompt tokens."""
    topk_prompt_logprobs: int = 0
    """Return this many most likely tokens at each prompt position."""
    topk_sample_logprobs: int = 0
    """Return this many most likely tokens at each sampled position."""
    target_prompt_logprobs: TensorData | None = None
    """Return log-probabilities of these token ids at the prompt positions after the first: int64,
    one row per position, -1 for none; of a CSR tensor, only the listed cells."""
    prompt_alt_tokens_k: int = 0
    """Sample this many alternative tokens at each prompt position after the first."""
    prompt_logprobs_last_n: int | None = None
    """Return log-probabilities only for this many last prompt tokens."""
    record_stability_info: bool | None = None
    """Record the information that `stable_reinforce` training needs."""
    type: Literal["sample"] = "sample"


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """The most likely tokens at each position, as two matrices with a row per position."""

    token_ids: Tokens
    """int32, padded with 0."""
    logprobs: Floats
    """float32, padded with -99999."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopkLogprobs):
            return NotImplemented
        return self.to_rows() == other.to_rows()

    __hash__ = None  # type: ignore[assignment]

    def to_rows(self) -> list[TopkRow | None]:
        """Return a list of (token id, logprob) per position; None for positions without data."""
        pairs = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [_topk_row(ids, logprobs) for ids, logprobs in pairs if ids]


def _topk_row(token_ids: list[int], logprobs: list[float]) -> TopkRow | None:
    row = list(zip(token_ids, logprobs, strict=True))
    if row[0] == (0, FILLER_LOGPROB):
        return None
    while row[-1] == (0, FILLER_LOGPROB):
        row.pop()
    return row


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Alternative tokens sampled at every prompt position after the first."""

    tokens: TensorData
    """int64, one row per position."""
    logprobs: TensorData
    """float32 log-probabilities of the tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """A sampled sequence as arrays; lists are created at first access."""

    stop_reason: StopReason
    """Why sampling ended."""
    sequence_id: str
    """Identifies this sequence in later requests."""
    tokens_np: Tokens | None = field(default=None, repr=False)
    """int32 token ids."""
    logprobs_np: Floats | None = field(default=None, repr=False)
    """float32 log-probabilities of the tokens, or None."""
    topk_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    """The most likely tokens at each position; None if not requested."""
    _tokens_list: list[int] | None = field(default=None, repr=False)
    _logprobs_list: list[float] | None = field(default=None, repr=False)
    _topk_logprobs_list: list[TopkRow | None] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> list[int]:
        """The token ids as a list."""
        if self._tokens_list is None:
            object.__setattr__(self, "_tokens_list", _to_list(self.tokens_np) or [])
        return self._tokens_list or []

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probabilities as a list, or None."""
        if self._logprobs_list is None and self.logprobs_np is not None:
            object.__setattr__(self, "_logprobs_list", self.logprobs_np.tolist())
        return self._logprobs_list

    @property
    def topk_logprobs(self) -> list[TopkRow | None] | None:
        """The most likely tokens per position as (token id, logprob); None if not requested."""
        if self._topk_logprobs_list is None and self.topk_logprobs_np is not None:
            object.__setattr__(self, "_topk_logprobs_list", self.topk_logprobs_np.to_rows())
        return self._topk_logprobs_list

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampledSequence):
            return NotImplemented
        return _field_values(self, _SEQUENCE_FIELDS) == _field_values(other, _SEQUENCE_FIELDS)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class SampleResponse:
    """The sampled sequences, and the requested information about the prompt."""

    sequences: Sequence[SampledSequence]
    """One per sample."""
    prompt_logprobs_np: Floats | None = field(default=None, repr=False)
    """float32 per prompt token, NaN where not computed; None if not requested."""
    topk_prompt_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    """The most likely tokens at each prompt position; None if not requested."""
    target_prompt_logprobs: TensorData | None = None
    """Log-probabilities of the requested ids, in their shape; None if not requested."""
    prompt_cache_hit_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    prompt_alt_tokens: PromptAltTokens | None = None
    """Alternative prompt tokens; None if not requested."""
    _prompt_logprobs_list: list[float | None] | None = field(default=None, repr=False)
    _topk_prompt_logprobs_list: list[TopkRow | None] | None = field(default=None, repr=False)

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The prompt's log-probabilities, None where not computed; None if not requested."""
        if self._prompt_logprobs_list is None and self.prompt_logprobs_np is not None:
            # NaN is the only number that differs from itself.
            scores = [x if x == x else None for x in self.prompt_logprobs_np.tolist()]
            object.__setattr__(self, "_prompt_logprobs_list", scores)
        return self._prompt_logprobs_list

    @property
    def topk_prompt_logprobs(self) -> list[TopkRow | None] | None:
        """The most likely tokens per prompt position; None if not requested."""
        if self._topk_prompt_logprobs_list is None and self.topk_prompt_logprobs_np is not None:
            rows = self.topk_prompt_logprobs_np.to_rows()
            object.__setattr__(self, "_topk_prompt_logprobs_list", rows)
        return self._topk_prompt_logprobs_list

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleResponse):
            return NotImplemented
        return _field_values(self, _RESPONSE_FIELDS) == _field_values(other, _RESPONSE_FIELDS)

    __hash__ = None  # type: ignore[assignment]


# Equality compares lists, so that values built from arrays and from lists can be equal.
_SEQUENCE_FIELDS = ("stop_reason", "sequence_id", "tokens", "logprobs", "topk_logprobs")
_RESPONSE_FIELDS = (
    "sequences",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "target_prompt_logprobs",
    "prompt_cache_hit_tokens",
    "prompt_alt_tokens",
)


def _field_values(value: object, names: tuple[str, ...]) -> list[object]:
    return [getattr(value, name) for name in names]


def _to_list(array: Tokens | None) -> list[int] | None:
    return None if array is None else array.tolist()
