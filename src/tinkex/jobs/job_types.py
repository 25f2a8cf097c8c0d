"""Job kinds, the decoding of their payloads, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

import msgspec

from tinkex import types
from tinkex.engine.inference_request import InferenceRequest
from tinkex.engine.protocol import EngineLost, StepRefused
from tinkex.errors import InvalidInput, RequestErrorCategory, StoreError, TinkexError
from tinkex.logs import get_logger
from tinkex.store.database import Connection
from tinkex.system.disk_errors import DISK_FULL_MESSAGE, is_disk_full
from tinkex.types.base import Message, encode_hook
from tinkex.wire.codec import convert_json, decode_json
from tinkex.wire.proto import decode_forward_backward_request

LOG = get_logger(__name__)
T = TypeVar("T")


class JobKind(StrEnum):
    """The kind of a job, named like its endpoint."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    CREATE_CUSTOM_LOSS = "create_custom_loss"
    SAMPLE = "asample"


#: Passes of several models can share a batch.
PASS_KINDS = frozenset({JobKind.FORWARD, JobKind.FORWARD_BACKWARD})
#: Kinds whose results are sent as protobuf.
PROTO_RESULT_KINDS = frozenset({JobKind.FORWARD, JobKind.FORWARD_BACKWARD, JobKind.SAMPLE})
#: The tenant of the server's own jobs, whose usage is not counted.
INTERNAL_TENANT = "tinkex:internal"
#: Precedes the JSON of a request of the inference endpoints. The payloads of other samples are
#: bodies that clients sent; those are JSON objects, so they never begin like this.
_INFERENCE_PREFIX = b"inference:"
#: The sum of token weights of a pass; stored, but not sent to the client.
TOTAL_WEIGHT_METRIC = "weight:sum"


class LoadPayload(Message):
    """The weights to load, resolved and authorized when the job was submitted."""

    path: str
    """The path that the client sent."""
    checkpoint_id: str
    """The checkpoint at this path when the job was submitted."""
    with_optimizer: bool
    place: str = ""
    """Where its files are in the object store; empty if they are in the home."""


def decode_payload(payload: bytes, type_: type[T]) -> T:
    """Decode a JSON request; raises InvalidInput if it is invalid."""
    try:
        return decode_json(payload, type_)
    except msgspec.DecodeError as error:
        raise _invalid_payload(error) from None


def encode_inference_payload(request: InferenceRequest) -> bytes:
    """The payload of a sample of the inference endpoints."""
    return _INFERENCE_PREFIX + msgspec.json.encode(request, enc_hook=encode_hook)


def decode_sample_payload(payload: bytes) -> types.SampleRequest:
    """Decode a sample of a client or of the inference endpoints; raises InvalidInput."""
    if payload.startswith(_INFERENCE_PREFIX):
        return decode_payload(payload.removeprefix(_INFERENCE_PREFIX), InferenceRequest)
    return decode_payload(payload, types.SampleRequest)


def decode_pass_payload(
    payload: bytes, *, is_proto: bool, is_forward_only: bool
) -> types.ForwardBackwardInput:
    """Decode the examples and the loss of a pass, from protobuf or JSON."""
    if is_proto:
        request, _ = decode_forward_backward_request(payload)
        return request.forward_backward_input
    try:
        body = msgspec.json.decode(payload)
        # Older clients use a separate endpoint with another field name.
        if is_forward_only and isinstance(body, dict) and "forward_input" in body:
            return convert_json(body, types.ForwardRequest).forward_input
        return convert_json(body, types.ForwardBackwardRequest).forward_backward_input
    except msgspec.DecodeError as error:
        raise _invalid_payload(error) from None


def _invalid_payload(error: msgspec.DecodeError) -> InvalidInput:
    return InvalidInput(f"the request cannot be decoded: {error}")


Effect: TypeAlias = Callable[[Connection], None]
"""A write that is committed in the same transaction as the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The outcome of a successful job."""

    result: bytes
    """The encoded response."""
    is_model_change: bool = False
    """Whether it changed its model and must be replayed after a crash."""
    num_tokens: int = 0
    metrics: Mapping[str, float] | None = None
    effects: tuple[Effect, ...] = ()
    upload: Callable[[], None] | None = None
    """Uploads the files of a save, which must be done before the outcome is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The outcome of a failed job."""

    message: str
    category: RequestErrorCategory
    is_model_change: bool = False
    """Whether it changed its model despite the failure."""
    num_tokens: int = 0
    effects: tuple[Effect, ...] = ()


JobOutcome: TypeAlias = Completed | Failed
#: Not the fault of a job, which runs again after the worker restarts.
WORKER_ERRORS = (StoreError, EngineLost)
CANCELLED = Failed(message="the request was cancelled", category=RequestErrorCategory.User)


def to_failed(error: Exception, operation: str) -> Failed:
    """Convert an exception to an outcome; unexpected ones are logged with a traceback."""
    if isinstance(error, InvalidInput):
        is_change = isinstance(error, StepRefused)
        return Failed(
            message=error.message, category=RequestErrorCategory.User, is_model_change=is_change
        )
    if isinstance(error, TinkexError):
        return Failed(message=error.message, category=error.category)
    if isinstance(error, ValueError):
        return Failed(message=str(error), category=RequestErrorCategory.User)
    if is_disk_full(error):
        LOG.error("%s failed: %s", operation, error)
        reason = f"the server could not use its disk: {DISK_FULL_MESSAGE}"
        return Failed(message=reason, category=RequestErrorCategory.Server)
    if isinstance(error, OSError) and error.strerror:
        LOG.error("%s failed", operation, exc_info=error)
        reason = f"the server could not use its disk: {error.strerror}"
        return Failed(message=reason, category=RequestErrorCategory.Server)
    LOG.error("%s failed", operation, exc_info=error)
    reason = f"{operation} failed in the server: {type(error).__name__}: {error}"
    return Failed(message=reason, category=RequestErrorCategory.Server)
