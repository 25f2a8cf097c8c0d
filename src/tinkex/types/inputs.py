"""Model inputs: token and media chunks, ModelInput, and the training example Datum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.base import Message, explain_mismatch, split_problem, value_at
from tinkex.types.tensors import (
    TensorData,
    TensorDtype,
    is_numpy_array,
    is_torch_tensor,
    read_tensor_shape,
)

MAX_TOKEN = 2**31 - 1
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]
ImageFormat: TypeAlias = Literal["png", "jpeg"]


class Tokenizer(Protocol):
    """An object that encodes text to token ids."""

    def encode(self, text: str, /) -> Any:
        """Return the token ids of a text."""
        ...


class EncodedTextChunk(Message, tag="encoded_text"):
    """A sequence of token ids."""

    type: ClassVar[Literal["encoded_text"]] = "encoded_text"

    tokens: Sequence[TokenId]
    """The ids; any sequence or integer array is accepted and stored as a list."""

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @classmethod
    def _error_message(cls, fields: Mapping[str, object], problem: str) -> str:
        _, path = split_problem(problem)
        if not path.startswith(".tokens["):
            return explain_mismatch(cls, fields, problem)
        index = path.removeprefix(".tokens[").removesuffix("]")
        token = value_at(fields, path)
        return f"token {index} is {token!r:.80}; token ids are integers from 0 to {MAX_TOKEN}"


class ImageChunk(Message, tag="image"):
    """An image, sent with the request."""

    type: ClassVar[Literal["image"]] = "image"

    data: bytes
    """The bytes of the file; text is decoded as base64."""
    format: ImageFormat
    """The file format."""
    expected_tokens: int | None = None
    """The expected number of tokens; the server refuses the request if it differs."""

    @property
    def length(self) -> int:
        """The number of tokens; raises if `expected_tokens` is not set."""
        return _expected_length(self)


class ImageAssetPointerChunk(Message, tag="image_asset_pointer"):
    """A reference to an image; for sampling only."""

    type: ClassVar[Literal["image_asset_pointer"]] = "image_asset_pointer"

    format: ImageFormat
    """The file format."""
    location: str
    """Path or URL of the file."""
    expected_tokens: int | None = None
    """The expected number of tokens."""

    @property
    def length(self) -> int:
        """The number of tokens; raises if `expected_tokens` is not set."""
        return _expected_length(self)


class DmelChunk(Message, tag="dmel"):
    """Audio tokens as a serialized tensor."""

    type: ClassVar[Literal["dmel"]] = "dmel"

    dmel: bytes
    """The serialized tensor; text is decoded as base64."""

    @property
    def length(self) -> int:
        """The first dimension of the tensor."""
        shape = read_tensor_shape(self.dmel)
        if not shape:
            raise InvalidInput("a dmel tensor needs at least one dimension, got shape ()")
        return shape[0]


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk

#: The field that identifies a chunk whose `type` is missing.
_TYPE_BY_FIELD = {
    "tokens": EncodedTextChunk.type,
    "data": ImageChunk.type,
    "location": ImageAssetPointerChunk.type,
}


def add_chunk_types(body: object) -> object:
    """Add the `type` to every chunk in `body`, which SDKs up to 0.16.1 omit.

    Changes the decoded JSON in place. An ambiguous chunk is refused.
    """
    pending: list[object] = [body]
    while pending:
        node = pending.pop()
        # Skip lists of numbers, such as token ids, by their first item.
        if isinstance(node, list) and node and isinstance(node[0], dict | list):
            pending.extend(node)
        elif isinstance(node, dict):
            for chunk in _untyped_chunks(node):
                chunk["type"] = _infer_chunk_type(chunk)
            pending.extend(node.values())
    return body


def _untyped_chunks(node: dict[str, object]) -> list[dict[str, object]]:
    chunks = node.get("chunks")
    if not isinstance(chunks, list):
        return []
    return [chunk for chunk in chunks if isinstance(chunk, dict) and "type" not in chunk]


def _infer_chunk_type(chunk: Mapping[str, object]) -> str:
    matches = [field for field in _TYPE_BY_FIELD if field in chunk]
    if len(matches) > 1 and isinstance(chunk.get("tokens"), int):
        # SDKs before 0.6 send the number of tokens of an image.
        matches.remove("tokens")
    if len(matches) == 1:
        return _TYPE_BY_FIELD[matches[0]]
    names = f"{' and '.join(matches)}" if matches else f"none of {', '.join(_TYPE_BY_FIELD)}"
    raise InvalidInput(f"a chunk without a type has {names}; set its type")


def _expected_length(chunk: ImageChunk | ImageAssetPointerChunk) -> int:
    if chunk.expected_tokens is None:
        raise InvalidInput(
            f"the length of this {type(chunk).__name__} is unknown; set expected_tokens"
        )
    return chunk.expected_tokens


class ModelInput(Message):
    """The input of a model: a sequence of chunks."""

    chunks: list[ModelInputChunk]
    """The chunks in order."""

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        """Build an input of one text chunk from token ids."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def from_text(cls, text: str, tokenizer: Tokenizer) -> Self:
        """Build an input of one text chunk from text."""
        if not isinstance(text, str):
            raise InvalidInput(f"from_text takes a string, got {text!r:.80}")
        if isinstance(tokenizer, str) or not callable(getattr(tokenizer, "encode", None)):
            raise InvalidInput(f"a tokenizer turns text into tokens, got {tokenizer!r:.80}")
        encoded = tokenizer.encode(text)
        return cls.from_ints(getattr(encoded, "ids", encoded))

    @classmethod
    def empty(cls) -> Self:
        """Build an empty input."""
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """Return all token ids; raises InvalidInput if a chunk is not text."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise InvalidInput(f"to_ints needs text chunks only, got a {type(chunk).__name__}")
            tokens.extend(chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """Return this input with one more chunk."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """Return this input with one more token."""
        return self.append(EncodedTextChunk(tokens=[token]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProvenanceSpan:
    sequence_id: str
    """`SampledSequence.sequence_id` of the source sequence."""
    offset: int = 0
    """The start of the span in that sequence."""
    length: int
    """The number of tokens."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise InvalidInput(f"{name}.sequence_id is {self.sequence_id!r}; expected an id")
        if self.offset < 0:
            raise InvalidInput(f"{name}.offset is {self.offset}; expected at least 0")
        if self.length < 0:
            raise InvalidInput(f"{name}.length is {self.length}; expected at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan(_ProvenanceSpan):
    """A span of tokens from the prompt of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan(_ProvenanceSpan):
    """A span of sampled tokens."""


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]
LossFnInputs: TypeAlias = dict[str, TensorData]

# msgspec cannot distinguish the two kinds of span in JSON, where they do not occur.
if TYPE_CHECKING:
    import torch

    from tinkex.types.arrays import Array

    _Spans: TypeAlias = ProvenanceSpans
    #: Types that a Datum converts to a tensor.
    LossFnInput: TypeAlias = TensorData | torch.Tensor | Array | Sequence[object]
else:
    _Spans = list

#: The dtype of a list under a known key; under other keys its numbers determine it.
_LIST_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
_SPARSE_FIELDS = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True, slots=True)
class Datum:
    """A training example: the model input, and the tensors of its loss."""

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    """Tensors by name; torch tensors, NumPy arrays and lists are converted."""
    model_input_spans: _Spans | None = None
    """The origin of the input tokens; set by `with_provenance`."""
    loss_fn_input_spans: _Spans | None = None
    """The origin of the target tokens; set by `with_provenance`."""

    if TYPE_CHECKING:

        def __init__(
            self,
            model_input: ModelInput,
            loss_fn_inputs: Mapping[str, LossFnInput] = ...,
            model_input_spans: ProvenanceSpans | None = None,
            loss_fn_input_spans: ProvenanceSpans | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.model_input, ModelInput):
            raise InvalidInput(
                f"Datum.model_input must be a ModelInput, got {self.model_input!r:.80}"
            )
        if not isinstance(self.loss_fn_inputs, Mapping):
            raise InvalidInput(
                f"Datum.loss_fn_inputs must be a dict, got {self.loss_fn_inputs!r:.80}"
            )
        tensors = {name: to_tensor(name, given) for name, given in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", tensors)
        _check_spans("model_input_spans", self.model_input_spans)
        _check_spans("loss_fn_input_spans", self.loss_fn_input_spans)
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise InvalidInput(
                "model_input_spans and loss_fn_input_spans go together, got "
                f"{self.model_input_spans!r:.80} and {self.loss_fn_input_spans!r:.80}"
            )

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Self:
        """Return a copy with the origin of its tokens; each list of spans must cover its field."""
        _check_coverage("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and len(targets.shape) == 1:
            _check_coverage("loss_fn_inputs", loss_fn_inputs, targets.shape[0])
        return replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)


def to_tensor(name: str, given: object) -> TensorData:
    """Convert a loss input to a tensor; refuse NaN and infinity."""
    try:
        tensor = _to_tensor_data(name, given)
    except InvalidInput as error:
        raise InvalidInput(f"loss_fn_inputs[{name!r}]: {error}") from None
    if tensor.dtype == "float32" and (not_finite := tensor.find_not_finite()) is not None:
        position, value = not_finite
        raise InvalidInput(f"{name}{position} is {value}; loss inputs must be finite")
    return tensor


def _to_tensor_data(name: str, given: object) -> TensorData:
    if isinstance(given, TensorData):
        return given
    if isinstance(given, list | tuple):
        return TensorData.from_list(given, _LIST_DTYPES.get(name), name)
    may_be_sparse = name in _SPARSE_FIELDS and getattr(given, "ndim", 0) == 2
    if is_torch_tensor(given):
        from_torch = TensorData.from_torch_sparse if may_be_sparse else TensorData.from_torch
        return from_torch(given)
    if is_numpy_array(given):
        from_numpy = TensorData.from_numpy_sparse if may_be_sparse else TensorData.from_numpy
        return from_numpy(given)
    raise InvalidInput(f"expected a tensor, an array or a list of numbers, got {given!r:.80}")


def _check_spans(name: str, spans: ProvenanceSpans | None) -> None:
    for span in spans or ():
        if not isinstance(span, PromptProvenanceSpan | SampledProvenanceSpan):
            raise InvalidInput(f"{name} holds provenance spans, got {span!r:.80}")


def _check_coverage(name: str, spans: ProvenanceSpans, length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise InvalidInput(f"the {name} spans cover {covered} positions, but there are {length}")
