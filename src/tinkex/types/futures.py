"""Promises: what a queued request is answered with, and how its result is fetched."""

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
    """A promise."""

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None
    """For sampling: the ids of the sequences to come, in their order."""


class FutureRetrieveRequest(Message):
    """Ask for a promise's result."""

    request_id: RequestID
    allow_metadata_only: bool = False
    """Let the server answer with the result's size instead, if it is large."""


class TryAgainResponse(Reply):
    """The result is not there yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: str
    """active, paused_capacity or paused_rate_limit."""
    queue_state_reason: str | None = None
    """Why, in words."""


class RequestFailedResponse(Reply):
    """The work failed."""

    error: str
    category: RequestErrorCategory
    """Whose fault it was."""


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
    """The promises of one sampling session, or of one clone of it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0
    """The clone's number; 0 is the original."""


class FuturesRetrieveRequest(Message):
    """Ask which promises of a sampling session are done."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    """The previous answer's `cursor`; 0 begins at the beginning."""
    timeout: float | None = None
    """How many seconds to wait for news."""
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)
    """Promises whose results were fetched; the server may drop them."""


class FutureFinished(Reply, tag_field="state", tag="finished"):
    """A promise whose result can be fetched."""

    state: ClassVar[Literal["finished"]] = "finished"

    request_id: RequestID
    response_payload_uncompressed_size: int | None = None
    """How many bytes the result has."""


class FutureFailed(Reply, tag_field="state", tag="failed"):
    """A promise whose work failed."""

    state: ClassVar[Literal["failed"]] = "failed"

    request_id: RequestID


FutureCompletion: TypeAlias = FutureFinished | FutureFailed

if TYPE_CHECKING:
    _OpenCompletion: TypeAlias = FutureCompletion
else:
    _OpenCompletion = open_union("completion", FutureCompletion, ignore_unknown)


class FuturesRetrieveResponse(Reply):
    """Promises that were done since the last question."""

    completions: list[_OpenCompletion]
    cursor: int
    """To hand back as `prev_cursor`."""

    def __post_init__(self) -> None:
        # A state that this version does not know was read as None: nobody can wait for it.
        known = [completion for completion in self.completions if completion is not None]
        msgspec.structs.force_setattr(self, "completions", known)
