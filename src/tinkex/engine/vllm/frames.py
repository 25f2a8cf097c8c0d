"""The frames that are exchanged with vLLM, and their conversion from requests and to responses."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.request import PromptLogprobsSpec, SampleSpec
from tinkex.types import SampledSequence, SampleResponse
from tinkex.types.sampling import FILLER_LOGPROB, StopReason, TopkLogprobs

#: vLLM raises lower temperatures to this one.
MIN_TEMPERATURE = 0.01
#: vLLM adds the index of the sequence to the seed, and takes 64 bits with a sign.
_SEED_MASK = (1 << 62) - 1


class ReadyFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ready"):
    """vLLM has loaded its model."""

    version: str
    max_context_tokens: int
    vocab_size: int
    max_lora_rank: int
    eos_tokens: list[int]


class FailedFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="failed"):
    """vLLM cannot start."""

    error: str


class SequenceFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled sequence; arrays are bytes."""

    tokens: bytes
    logprobs: bytes
    topk: tuple[bytes, bytes] | None
    stop_reason: str | None


class DoneFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="done"):
    """The result of a sample."""

    id: str
    sequences: list[SequenceFrame]
    num_cached_tokens: int
    prompt_logprobs: bytes | None = None
    prompt_topk: tuple[bytes, bytes] | None = None


class DeclinedFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="declined"):
    """vLLM cannot run the sample."""

    id: str
    error: str


Answer: TypeAlias = ReadyFrame | FailedFrame | DoneFrame | DeclinedFrame


def find_unsupported(spec: SampleSpec, *, has_unembed: bool) -> str | None:
    """Return why vLLM must not run a request; None if it gives the same results as our engine.

    `has_unembed` is whether vLLM applies adapters to the unembedding.
    """
    if spec.top_k or spec.top_p < 1.0:
        # Ours are those before the truncation.
        return "its log-probabilities are those after top_k and top_p"
    if spec.grammar is not None:
        return "it is not given grammars"
    if 0.0 < spec.temperature < MIN_TEMPERATURE:
        return f"its lowest temperature is {MIN_TEMPERATURE}"
    prompt = spec.prompt_logprobs
    if prompt is not None and has_unembed:
        # vLLM 0.32 ends when it applies an adapter to the unembedding of prompt tokens.
        return "it does not score prompts while adapters may have an unembedding"
    if prompt is not None and (prompt.num_alternatives or prompt.targets is not None):
        return "it has neither target_prompt_logprobs nor alternatives of prompt tokens"
    return None


def encode_sample(
    job_id: str, spec: SampleSpec, *, adapter: tuple[int, str] | None, salt: str
) -> dict[str, object]:
    """The frame of a request; `adapter` is the id and the directory of the weights."""
    prompt = spec.prompt_logprobs
    params = {
        "n": spec.num_samples,
        # vLLM samples at least one.
        "max_tokens": max(1, spec.max_tokens),
        "seed": spec.seed & _SEED_MASK,
        "temperature": spec.temperature,
        "stop": list(spec.stops.texts),
        "stop_token_ids": sorted(spec.stops.tokens),
        "logprobs": spec.num_topk,
        "prompt_logprobs": prompt.num_topk if prompt is not None else None,
        "detokenize": bool(spec.stops.texts),
    }
    return {
        "type": "sample",
        "id": job_id,
        "prompt": spec.prompt.tolist(),
        "params": params,
        "adapter": None if adapter is None else {"id": adapter[0], "path": adapter[1]},
        "salt": salt,
    }


def decode_done(frame: DoneFrame, spec: SampleSpec) -> SampleResponse | None:
    """The response of a sample; None if vLLM has aborted it."""
    if any(sequence.stop_reason not in {"stop", "length"} for sequence in frame.sequences):
        return None
    sequences = [_decode_sequence(sequence, spec) for sequence in frame.sequences]
    logprobs, topk = None, None
    if spec.prompt_logprobs is not None:
        logprobs, topk = _decode_prompt(frame, spec.prompt_logprobs)
    return SampleResponse(
        sequences, logprobs, topk, prompt_cache_hit_tokens=frame.num_cached_tokens
    )


def _decode_sequence(frame: SequenceFrame, spec: SampleSpec) -> SampledSequence:
    tokens = np.frombuffer(frame.tokens, dtype=np.int32)
    logprobs = np.frombuffer(frame.logprobs, dtype=np.float32)
    if not spec.max_tokens:
        return SampledSequence("length", "", tokens[:0], logprobs[:0])
    stop_reason: StopReason = "stop" if frame.stop_reason == "stop" else "length"
    topk = _decode_topk(frame.topk, spec.num_topk)
    return SampledSequence(stop_reason, "", tokens, logprobs, topk)


def _decode_prompt(
    frame: DoneFrame, spec: PromptLogprobsSpec
) -> tuple[npt.NDArray[np.float32] | None, TopkLogprobs | None]:
    first = spec.first_scored
    logprobs = np.frombuffer(frame.prompt_logprobs or b"", dtype=np.float32).copy()
    logprobs[:first] = np.nan
    topk = _decode_topk(frame.prompt_topk, spec.num_topk)
    if topk is not None:
        topk.token_ids[:first] = 0
        topk.logprobs[:first] = FILLER_LOGPROB
    return logprobs if spec.has_logprobs else None, topk


def _decode_topk(topk: tuple[bytes, bytes] | None, k: int) -> TopkLogprobs | None:
    if topk is None or not k:
        return None
    ids = np.frombuffer(topk[0], dtype=np.int32).reshape(-1, k).copy()
    logprobs = np.frombuffer(topk[1], dtype=np.float32).reshape(-1, k).copy()
    # The wire format has no minus infinity; the filler is its lowest value.
    return TopkLogprobs(np.maximum(ids, 0), np.maximum(logprobs, np.float32(FILLER_LOGPROB)))
