"""Protobuf codec of SampleResponse: sequences and log-probabilities as raw arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tinkex.types.sampling import (
    FILLER_LOGPROB,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    StopReason,
    TopkLogprobs,
    TopkRow,
)
from tinkex.types.tensors import TensorData
from tinkex.wire.proto.protobuf import (
    EMPTY,
    LEN,
    VARINT,
    MessageWriter,
    Readers,
    WireError,
    make_tag,
    read_fields,
    read_singular,
    to_int32,
    to_payload,
    to_uint32,
)
from tinkex.wire.proto.tensors import array_bytes, copy_array, read_tensor, write_tensor

if TYPE_CHECKING:
    from tinkex.types.arrays import Array

# SampleResponse
SEQUENCES = make_tag(1, LEN)
PROMPT_LOGPROBS = make_tag(2, LEN)
TOPK_PROMPT_LOGPROBS = make_tag(3, LEN)
PROMPT_CACHE_HIT_TOKENS = make_tag(4, VARINT)
TARGET_PROMPT_LOGPROBS = make_tag(5, LEN)
PROMPT_ALT_TOKENS = make_tag(6, LEN)
# SampledSequence
STOP_REASON = make_tag(1, VARINT)
TOKENS = make_tag(2, LEN)
LOGPROBS = make_tag(3, LEN)
TOPK_SAMPLED_LOGPROBS = make_tag(4, LEN)
# TopkLogprobs
TOPK_TOKEN_IDS = make_tag(1, LEN)
TOPK_LOGPROBS = make_tag(2, LEN)
TOPK_K = make_tag(3, VARINT)
TOPK_LENGTH = make_tag(4, VARINT)
# PromptAltTokens
ALT_TOKENS = make_tag(1, LEN)
ALT_LOGPROBS = make_tag(2, LEN)

STOP_REASONS: dict[int, StopReason] = {0: "stop", 1: "length"}
STOP_REASON_CODES = {reason: code for code, reason in STOP_REASONS.items()}


def encode_sample_response(response: SampleResponse) -> bytes:
    """Encode the result of a sample."""
    message = MessageWriter()
    for sequence in response.sequences:
        message.message(SEQUENCES, _write_sequence, sequence)
    _write_floats(message, PROMPT_LOGPROBS, _array_or_list(response, "prompt_logprobs"))
    _write_topk(message, TOPK_PROMPT_LOGPROBS, _array_or_list(response, "topk_prompt_logprobs"))
    message.number(PROMPT_CACHE_HIT_TOKENS, response.prompt_cache_hit_tokens)
    if response.target_prompt_logprobs is not None:
        message.message(TARGET_PROMPT_LOGPROBS, write_tensor, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        message.message(PROMPT_ALT_TOKENS, _write_alternatives, response.prompt_alt_tokens)
    return message.to_bytes()


def _write_sequence(message: MessageWriter, sequence: SampledSequence) -> None:
    message.number(STOP_REASON, STOP_REASON_CODES[sequence.stop_reason])
    message.payload(TOKENS, _array_payload(_array_or_list(sequence, "tokens"), "<i4"))
    _write_floats(message, LOGPROBS, _array_or_list(sequence, "logprobs"))
    _write_topk(message, TOPK_SAMPLED_LOGPROBS, _array_or_list(sequence, "topk_logprobs"))


def _write_floats(message: MessageWriter, tag_: int, numbers: object) -> None:
    if numbers is not None:
        message.payload(tag_, _array_payload(numbers, "<f4"), present=True)


def _write_topk(
    message: MessageWriter, tag_: int, topk: TopkLogprobs | Sequence[TopkRow | None] | None
) -> None:
    if topk is not None:
        matrices = topk if isinstance(topk, TopkLogprobs) else topk_from_rows(topk)
        message.message(tag_, _write_matrices, matrices)


def _write_matrices(message: MessageWriter, topk: TopkLogprobs) -> None:
    length, k = topk.token_ids.shape
    message.payload(TOPK_TOKEN_IDS, _array_payload(topk.token_ids, "<i4"))
    message.payload(TOPK_LOGPROBS, _array_payload(topk.logprobs, "<f4"))
    message.number(TOPK_K, k)
    message.number(TOPK_LENGTH, length)


def _write_alternatives(message: MessageWriter, alternatives: PromptAltTokens) -> None:
    message.message(ALT_TOKENS, write_tensor, alternatives.tokens)
    message.message(ALT_LOGPROBS, write_tensor, alternatives.logprobs)


def _array_or_list(owner: SampleResponse | SampledSequence, name: str) -> Any:
    """Return the array if the value has one; the list would have to be built from it."""
    array = getattr(owner, f"{name}_np")
    return getattr(owner, name) if array is None else array


def _array_payload(numbers: object, on_wire: str) -> memoryview:
    import numpy as np

    return array_bytes(np.asarray(numbers, on_wire))


def topk_from_rows(rows: Sequence[Sequence[tuple[int, float]] | None]) -> TopkLogprobs:
    """Convert rows of (token id, logprob) to matrices, padded to the longest row."""
    import numpy as np

    width = max((len(row) for row in rows if row), default=0)
    token_ids = np.zeros((len(rows), width), np.int32)
    logprobs = np.full((len(rows), width), FILLER_LOGPROB, np.float32)
    for index, row in enumerate(rows):
        for column, (token_id, logprob) in enumerate(row or ()):
            token_ids[index, column] = token_id
            logprobs[index, column] = logprob
    return TopkLogprobs(token_ids, logprobs)


def decode_sample_response(data: bytes) -> SampleResponse:
    """Decode a result; `sequence_id` is empty, because it is part of the future."""
    sequences: list[SampledSequence] = []
    fields: dict[str, Any] = {}
    for tag_, number, payload in read_fields(memoryview(data)):
        if tag_ == SEQUENCES:
            sequences.append(_read_sequence(payload))
        elif tag_ == PROMPT_CACHE_HIT_TOKENS:
            fields["prompt_cache_hit_tokens"] = to_int32(number)
        elif tag_ in _FIELD_READERS:
            name, read = _FIELD_READERS[tag_]
            fields[name] = read(payload)
    return SampleResponse(sequences=sequences, **fields)


def _read_sequence(data: memoryview) -> SampledSequence:
    code, tokens, logprobs, topk = 0, EMPTY, EMPTY, None
    for tag_, number, payload in read_fields(data):
        if tag_ == STOP_REASON:
            code = to_int32(number)
        elif tag_ == TOKENS:
            tokens = payload
        elif tag_ == LOGPROBS:
            logprobs = payload
        elif tag_ == TOPK_SAMPLED_LOGPROBS:
            topk = _read_topk(payload)
    if code not in STOP_REASONS:
        raise WireError(f"stop_reason {code} is unknown")
    tokens_np = copy_array(tokens, "<i4", 4, "tokens")
    return SampledSequence(STOP_REASONS[code], "", tokens_np, _read_logprobs(logprobs), topk)


def _read_logprobs(payload: memoryview) -> Array | None:
    """Read log-probabilities; None if they were not requested."""
    return copy_array(payload, "<f4", 4, "logprobs") if payload else None


def _read_topk(data: memoryview) -> TopkLogprobs | None:
    fields = read_singular(data, _TOPK_READERS)
    k, length = fields.get(TOPK_K, 0), fields.get(TOPK_LENGTH, 0)
    if k == 0 or length == 0:
        return None
    matrices = []
    for tag_, on_wire in ((TOPK_TOKEN_IDS, "<i4"), (TOPK_LOGPROBS, "<f4")):
        flat = copy_array(fields.get(tag_, EMPTY), on_wire, 4, "topk_logprobs")
        if flat.size != k * length:
            raise WireError(f"topk_logprobs has {flat.size} numbers for {length} rows of {k}")
        matrices.append(flat.reshape(length, k))
    return TopkLogprobs(*matrices)


def _read_alternatives(data: memoryview) -> PromptAltTokens:
    fields = read_singular(data, {ALT_TOKENS: to_payload, ALT_LOGPROBS: to_payload})
    return PromptAltTokens(
        tokens=read_tensor(fields.get(ALT_TOKENS, EMPTY), "prompt_alt_tokens.tokens"),
        logprobs=read_tensor(fields.get(ALT_LOGPROBS, EMPTY), "prompt_alt_tokens.logprobs"),
    )


def _read_target_logprobs(data: memoryview) -> TensorData:
    return read_tensor(data, "target_prompt_logprobs")


_TOPK_READERS: Readers = {
    TOPK_TOKEN_IDS: to_payload,
    TOPK_LOGPROBS: to_payload,
    TOPK_K: to_uint32,
    TOPK_LENGTH: to_uint32,
}
_FIELD_READERS: dict[int, tuple[str, Callable[[memoryview], Any]]] = {
    PROMPT_LOGPROBS: ("prompt_logprobs_np", _read_logprobs),
    TOPK_PROMPT_LOGPROBS: ("topk_prompt_logprobs_np", _read_topk),
    TARGET_PROMPT_LOGPROBS: ("target_prompt_logprobs", _read_target_logprobs),
    PROMPT_ALT_TOKENS: ("prompt_alt_tokens", _read_alternatives),
}
