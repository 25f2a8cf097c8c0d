"""Protobuf codec of ForwardBackwardRequest."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import TypeAlias, cast

from tinkex.errors import InvalidInput
from tinkex.types.inputs import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
)
from tinkex.types.tensors import TensorData, TensorDtype
from tinkex.types.training import ForwardBackwardInput, ForwardBackwardRequest, LossFnType
from tinkex.wire.proto.protobuf import (
    DOUBLE_VALUE,
    FIXED64,
    LEN,
    MESSAGE_VALUE,
    VARINT,
    MessageWriter,
    WireError,
    encode_map_key,
    encode_tag_and_number,
    make_tag,
    read_fields,
    read_map_entry,
    read_oneof,
    read_singular,
    to_double,
    to_int32,
    to_int64,
    to_payload,
    to_text,
    write_double_value,
)
from tinkex.wire.proto.tensors import (
    DENSE,
    DTYPE_CODES,
    WIRE_DTYPES,
    array_bytes,
    encode_dtype_and_shape,
    read_tensor,
    write_tensor,
)

# ForwardBackwardRequest
MODEL_ID = make_tag(1, LEN)
SEQ_ID = make_tag(2, VARINT)
DATA = make_tag(3, LEN)
LOSS_FN = make_tag(4, LEN)
LOSS_FN_CONFIG = make_tag(5, LEN)
FORWARD_ONLY = make_tag(6, VARINT)
LOSS_FN_CONFIG_V2 = make_tag(7, LEN)
# LossConfigValue
CONFIG_NUMBER = make_tag(1, FIXED64)
CONFIG_TEXT = make_tag(2, LEN)
# Datum
MODEL_INPUT = make_tag(1, LEN)
LOSS_FN_INPUTS = make_tag(2, LEN)
MODEL_INPUT_SPANS = make_tag(3, LEN)
LOSS_FN_INPUT_SPANS = make_tag(4, LEN)
# Chunk
ENCODED_TEXT = make_tag(1, LEN)
IMAGE = make_tag(2, LEN)
DMEL = make_tag(3, LEN)
# EncodedTextChunk, ImageChunk, DmelChunk
TEXT_TOKENS = make_tag(1, LEN)
IMAGE_DATA = make_tag(1, LEN)
IMAGE_FORMAT = make_tag(2, LEN)
IMAGE_EXPECTED_TOKENS = make_tag(3, VARINT)
DMEL_BYTES = make_tag(1, LEN)
# ProvenanceSpan
PROMPT_TOKENS = make_tag(1, LEN)
SAMPLED_TOKENS = make_tag(2, LEN)
# PromptProvenanceSpan, SampledProvenanceSpan
SPAN_SEQUENCE_ID = make_tag(1, LEN)
SPAN_OFFSET = make_tag(2, VARINT)
SPAN_LENGTH = make_tag(3, VARINT)

Span: TypeAlias = PromptProvenanceSpan | SampledProvenanceSpan
#: Maximum number of datums, chunks, tensors and spans per request.
MAX_PARTS = 262_144


# --- encoding (client) ---------------------------------------------------------------------
def encode_forward_backward_request(
    request: ForwardBackwardRequest, forward_only: bool = False
) -> bytes:
    """Encode the body of a forward_backward or, with `forward_only`, of a forward request."""
    inputs = request.forward_backward_input
    config = _check_loss_config(inputs.loss_fn_config or {})
    numbers = {name: value for name, value in config.items() if isinstance(value, float)}
    message = MessageWriter()
    message.text(MODEL_ID, _check_text("model_id", request.model_id))
    message.number(SEQ_ID, _check_int32("seq_id", request.seq_id or 0))
    for datum in inputs.data:
        message.message(DATA, _write_datum, datum)
    message.text(LOSS_FN, _check_text("loss_fn", inputs.loss_fn))
    # Older servers read only this map, which has the numbers.
    message.entries(LOSS_FN_CONFIG, write_double_value, numbers)
    message.number(FORWARD_ONLY, forward_only)
    message.entries(LOSS_FN_CONFIG_V2, _write_config, config)
    return message.to_bytes()


def _check_loss_config(config: Mapping[str, float | str]) -> dict[str, float | str]:
    checked: dict[str, float | str] = {}
    for name, value in config.items():
        try:
            checked[name] = value if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(
                f"loss_fn_config[{name!r}] is {value!r:.80}; expected a number or a text"
            ) from None
    return checked


def _write_config(entry: MessageWriter, value: float | str) -> None:
    entry.message(MESSAGE_VALUE, _write_config_value, value)


def _write_config_value(message: MessageWriter, value: float | str) -> None:
    if isinstance(value, str):
        message.text(CONFIG_TEXT, value, present=True)
    else:
        message.double(CONFIG_NUMBER, value)


def _write_datum(message: MessageWriter, datum: Datum) -> None:
    # Tokens and dense tensors are the common case; their prefixes repeat, so these are cached.
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            packed = _pack_tokens(chunk.tokens)
            message.framed(_text_prefix(len(packed)), packed)
        else:
            message.message(MODEL_INPUT, _write_chunk, chunk)
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.is_sparse:
            message.entries(LOSS_FN_INPUTS, _write_loss_input, {name: tensor})
        else:
            opening, closing = _dense_prefix_and_suffix(name, tensor.dtype, tuple(tensor.shape))
            message.framed(opening, array_bytes(tensor.array), closing)
    for span in datum.model_input_spans or ():
        message.message(MODEL_INPUT_SPANS, _write_span, span)
    for span in datum.loss_fn_input_spans or ():
        message.message(LOSS_FN_INPUT_SPANS, _write_span, span)


def _write_loss_input(entry: MessageWriter, tensor: TensorData) -> None:
    entry.message(MESSAGE_VALUE, write_tensor, tensor)


@lru_cache(maxsize=1024)
def _text_prefix(num_bytes: int) -> bytes:
    """Encode everything before the tokens of a text chunk."""
    tokens = encode_tag_and_number(TEXT_TOKENS, num_bytes) if num_bytes else b""
    text = encode_tag_and_number(ENCODED_TEXT, len(tokens) + num_bytes) + tokens
    return encode_tag_and_number(MODEL_INPUT, len(text) + num_bytes) + text


@lru_cache(maxsize=1024)
def _dense_prefix_and_suffix(
    name: str, dtype: TensorDtype, shape: tuple[int, ...]
) -> tuple[bytes, bytes]:
    """Encode everything before and after the numbers of a dense loss input."""
    num_bytes = WIRE_DTYPES[DTYPE_CODES[dtype]].num_bytes * prod(shape)
    closing = encode_dtype_and_shape(dtype, shape)
    dense = encode_tag_and_number(DENSE, num_bytes)
    value = encode_tag_and_number(MESSAGE_VALUE, len(dense) + num_bytes + len(closing)) + dense
    entry = encode_map_key(name) + value
    return encode_tag_and_number(
        LOSS_FN_INPUTS, len(entry) + num_bytes + len(closing)
    ) + entry, closing


def _write_chunk(message: MessageWriter, chunk: ModelInputChunk) -> None:
    if isinstance(chunk, ImageChunk):
        message.message(IMAGE, _write_image, chunk)
    elif isinstance(chunk, DmelChunk):
        message.message(DMEL, _write_dmel, chunk)
    else:
        raise InvalidInput(f"training does not accept {type(chunk).__name__}, got {chunk!r:.80}")


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    try:
        # For lists this is twice as fast as NumPy.
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error:
        for token in tokens:
            _check_int32("token", token)
        raise


def _write_image(message: MessageWriter, chunk: ImageChunk) -> None:
    message.payload(IMAGE_DATA, chunk.data)
    message.text(IMAGE_FORMAT, chunk.format)
    if chunk.expected_tokens is not None:
        expected = _check_int32("expected_tokens", chunk.expected_tokens)
        message.number(IMAGE_EXPECTED_TOKENS, expected, present=True)


def _write_dmel(message: MessageWriter, chunk: DmelChunk) -> None:
    message.payload(DMEL_BYTES, chunk.dmel)


def _write_span(message: MessageWriter, span: Span) -> None:
    is_sampled = isinstance(span, SampledProvenanceSpan)
    message.message(SAMPLED_TOKENS if is_sampled else PROMPT_TOKENS, _write_span_fields, span)


def _write_span_fields(message: MessageWriter, span: Span) -> None:
    message.text(SPAN_SEQUENCE_ID, span.sequence_id)
    message.number(SPAN_OFFSET, span.offset)
    message.number(SPAN_LENGTH, span.length)


def _check_int32(name: str, value: int) -> int:
    if not hasattr(value, "__index__") or not -(1 << 31) <= value < 1 << 31:
        raise InvalidInput(f"{name} is {value!r:.80}; expected a 32-bit integer")
    return value


def _check_text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} is {value!r:.80}; expected a text")
    return value


# --- decoding (server) ---------------------------------------------------------------------
def decode_forward_backward_request(data: bytes) -> tuple[ForwardBackwardRequest, bool]:
    """Decode a request; returns it and whether it is forward only."""
    texts = {MODEL_ID: "", LOSS_FN: ""}
    numbers = {SEQ_ID: 0, FORWARD_ONLY: 0}
    datums: list[Datum] = []
    num_parts = 0
    legacy_config: dict[str, float | str] = {}
    config: dict[str, float | str] = {}
    for tag_, number, payload in read_fields(memoryview(data)):
        if tag_ == DATA:
            datums.append(_read_datum(payload))
            num_parts += _count_parts(datums[-1])
            if num_parts > MAX_PARTS:
                raise WireError(f"the request has more than {MAX_PARTS} parts; send fewer datums")
        elif tag_ in texts:
            texts[tag_] = to_text(payload)
        elif tag_ in numbers:
            numbers[tag_] = number
        elif tag_ == LOSS_FN_CONFIG:
            name, value = read_map_entry(payload, DOUBLE_VALUE)
            legacy_config[name] = to_double(value)
        elif tag_ == LOSS_FN_CONFIG_V2:
            name, value = read_map_entry(payload, MESSAGE_VALUE)
            config[name] = read_oneof(value, CONFIG_READERS, f"loss_fn_config[{name!r:.80}]")
    request = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(
            data=datums,
            loss_fn=cast(LossFnType, texts[LOSS_FN]),
            loss_fn_config=config or legacy_config or None,
        ),
        model_id=texts[MODEL_ID],
        seq_id=to_int32(numbers[SEQ_ID]),
    )
    return request, bool(numbers[FORWARD_ONLY])


def _read_datum(data: memoryview) -> Datum:
    chunks: list[ModelInputChunk] = []
    tensors: dict[str, TensorData] = {}
    spans: dict[int, list[Span]] = {MODEL_INPUT_SPANS: [], LOSS_FN_INPUT_SPANS: []}
    for tag_, _, payload in read_fields(data):
        if tag_ == MODEL_INPUT:
            chunks.append(read_oneof(payload, CHUNK_READERS, "a chunk"))
        elif tag_ == LOSS_FN_INPUTS:
            name, tensor = read_map_entry(payload, MESSAGE_VALUE)
            tensors[name] = read_tensor(tensor, f"loss_fn_inputs[{name!r:.80}]")
        elif tag_ in spans:
            spans[tag_].append(read_oneof(payload, SPAN_READERS, "a provenance span"))
    has_spans = any(spans.values())
    return Datum(
        model_input=ModelInput(chunks=chunks),
        loss_fn_inputs=tensors,
        model_input_spans=spans[MODEL_INPUT_SPANS] if has_spans else None,
        loss_fn_input_spans=spans[LOSS_FN_INPUT_SPANS] if has_spans else None,
    )


def _count_parts(datum: Datum) -> int:
    spans = (datum.model_input_spans or (), datum.loss_fn_input_spans or ())
    return 1 + len(datum.model_input.chunks) + len(datum.loss_fn_inputs) + sum(map(len, spans))


def _read_text(data: memoryview) -> EncodedTextChunk:
    payload = read_singular(data, {TEXT_TOKENS: to_payload}).get(TEXT_TOKENS, b"")
    if len(payload) % 4:
        raise WireError(f"a text chunk has {len(payload)} bytes, not a multiple of 4")
    return EncodedTextChunk(tokens=list(struct.unpack(f"<{len(payload) // 4}i", payload)))


def _read_image(data: memoryview) -> ImageChunk:
    fields = read_singular(
        data, {IMAGE_DATA: bytes, IMAGE_FORMAT: to_text, IMAGE_EXPECTED_TOKENS: to_int32}
    )
    return ImageChunk(
        data=fields.get(IMAGE_DATA, b""),
        format=fields.get(IMAGE_FORMAT, ""),
        expected_tokens=fields.get(IMAGE_EXPECTED_TOKENS),
    )


def _read_dmel(data: memoryview) -> DmelChunk:
    return DmelChunk(dmel=read_singular(data, {DMEL_BYTES: bytes}).get(DMEL_BYTES, b""))


def _read_span(kind: Callable[..., Span], data: memoryview) -> Span:
    fields = read_singular(
        data, {SPAN_SEQUENCE_ID: to_text, SPAN_OFFSET: to_int64, SPAN_LENGTH: to_int64}
    )
    return kind(
        sequence_id=fields.get(SPAN_SEQUENCE_ID, ""),
        offset=fields.get(SPAN_OFFSET, 0),
        length=fields.get(SPAN_LENGTH, 0),
    )


CONFIG_READERS: dict[int, Callable[[memoryview], float | str]] = {
    CONFIG_NUMBER: to_double,
    CONFIG_TEXT: to_text,
}
CHUNK_READERS: dict[int, Callable[[memoryview], ModelInputChunk]] = {
    ENCODED_TEXT: _read_text,
    IMAGE: _read_image,
    DMEL: _read_dmel,
}
SPAN_READERS = {
    PROMPT_TOKENS: partial(_read_span, PromptProvenanceSpan),
    SAMPLED_TOKENS: partial(_read_span, SampledProvenanceSpan),
}
