"""Futures: the response to a queued request, and how its result is retrieved."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import msgspec

from tinkex.errors import RequestErrorCategory
from tinkex.types.base import Message, Reply
from tinkex.types.models import (
    CreateModelResponse,
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from tinkex.types.open_types import ignore_unknown, open_union
from tinkex.types.training import ForwardBackwardOutput, ModelID, OptimStepResponse

RequestID: TypeAlias = str


class UntypedAPIFuture(Reply):
    """A future: the handle of a queued request."""

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None
    """For samples: the ids of the future sequences, in order."""


class FutureRetrieveRequest(Message):
    """Request the result of a future."""

    request_id: RequestID
    allow_metadata_only: bool = False
    """Allow the server to return only the size of a large result."""


class TryAgainResponse(Reply):
    """The result is not ready."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: str
    """active, paused_capacity or paused_rate_limit."""
    queue_state_reason: str | None = None
    """The reason for people."""


class RequestFailedResponse(Reply):
    """The work failed."""

    error: str
    category: RequestErrorCategory
    """Whether the user or the server caused it."""


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)


class SamplingSessionFuturesTarget(Message):
    """The futures of a sampling session, or of one clone."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0
    """The number of the clone; 0 is the original."""


class FuturesRetrieveRequest(Message):
    """Request the finished futures of a sampling session."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    """The `cursor` of the previous response; 0 starts at the beginning."""
    timeout: float | None = None
    """Seconds to wait for new completions."""
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)
    """Futures whose results were retrieved; the server may drop them."""


class FutureFinished(Reply, tag_field="state", tag="finished"):
    """A future whose result can be retrieved."""

    state: ClassVar[Literal["finished"]] = "finished"

    request_id: RequestID
    response_payload_uncompressed_size: int | None = None
    """The size of the result."""


class FutureFailed(Reply, tag_field="state", tag="failed"):
    """A future that failed."""

    state: ClassVar[Literal["failed"]] = "failed"

    request_id: RequestID


FutureCompletion: TypeAlias = FutureFinished | FutureFailed

if TYPE_CHECKING:
    _OpenCompletion: TypeAlias = FutureCompletion
else:
    _OpenCompletion = open_union("completion", FutureCompletion, ignore_unknown)


class FuturesRetrieveResponse(Reply):
    """Futures that finished since the previous request."""

    completions: list[_OpenCompletion]
    cursor: int
    """The next `prev_cursor`."""

    def __post_init__(self) -> None:
        # States unknown to this version were decoded as None.
        known = [completion for completion in self.completions if completion is not None]
        msgspec.structs.force_setattr(self, "completions", known)
