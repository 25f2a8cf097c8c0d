"""Session states and session search."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, field

from tinkex.types.base import Message, Reply
from tinkex.types.open_types import ignore_unknown, open_union


class SessionFailedRequestReason(Reply, tag="request"):
    """A request caused the failure."""

    type: ClassVar[Literal["request"]] = "request"

    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Reply, tag="training_run"):
    """A training run caused the failure."""

    type: ClassVar[Literal["training_run"]] = "training_run"

    training_run_id: str


class SessionFailedSamplingSessionReason(Reply, tag="sampling_session"):
    """A sampling session caused the failure."""

    type: ClassVar[Literal["sampling_session"]] = "sampling_session"

    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(Reply, tag="failed"):
    """The session failed."""

    type: ClassVar[Literal["failed"]] = "failed"

    category: Literal["user", "internal"]
    """Whether the user or the server caused it."""
    reason: SessionFailedReason
    """What failed."""
    message: str


class SessionCancelled(Reply, tag="cancelled"):
    """The session was stopped in the console."""

    type: ClassVar[Literal["cancelled"]] = "cancelled"

    detail: str | None = None


class ClientSessionFinishSuccess(Reply, tag="success"):
    """The client ended successfully."""

    type: ClassVar[Literal["success"]] = "success"


class ClientSessionFinishErrored(Reply, tag="errored"):
    """The client ended with an error."""

    type: ClassVar[Literal["errored"]] = "errored"


class ClientSessionFinishInterrupted(Reply, tag="interrupted"):
    """The client was interrupted."""

    type: ClassVar[Literal["interrupted"]] = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


class ClientSessionFinished(Reply, tag="client_finished"):
    """The client finished the session."""

    type: ClassVar[Literal["client_finished"]] = "client_finished"

    reason: ClientSessionFinishReason
    """How it ended."""
    detail: str | None = None


class SessionActive(Reply, tag="active"):
    """The session is running."""

    type: ClassVar[Literal["active"]] = "active"


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


class OwnSearchOwner(Message, tag="own"):
    """The caller's sessions."""

    type: ClassVar[Literal["own"]] = "own"


class AccessibleSearchOwner(Message, tag="accessible"):
    """All sessions that the caller may see."""

    type: ClassVar[Literal["accessible"]] = "accessible"


class UserSearchOwner(Message, tag="user"):
    """The sessions of certain users."""

    type: ClassVar[Literal["user"]] = "user"

    owner_urns: Annotated[list[str], Meta(min_length=1, max_length=10)]
    """1 to 10 owners."""


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Message, tag="active"):
    """Sessions that are running."""

    type: ClassVar[Literal["active"]] = "active"


class CancelledSessionStatusQuery(Message, tag="cancelled"):
    """Sessions that were stopped in the console."""

    type: ClassVar[Literal["cancelled"]] = "cancelled"


class FailedSessionStatusQuery(Message, tag="failed"):
    """Failed sessions."""

    type: ClassVar[Literal["failed"]] = "failed"


class ClientFinishedSessionStatusQuery(Message, tag="client_finished"):
    """Sessions that were finished by their client."""

    type: ClassVar[Literal["client_finished"]] = "client_finished"

    reasons: Annotated[list[ClientSessionFinishReasonType], Meta(min_length=1)] | None = None
    """How the client ended; None means any reason."""


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Reply):
    """The start of the next page; pass it back unchanged."""

    last_created_at: Annotated[datetime, Meta(tz=True)]
    last_session_id: str


class SessionSearchRequest(Message):
    """Request sessions; all conditions must match, but of id and name only one."""

    session_id: str | None = None
    """This session."""
    project_ids: list[str] | None = None
    """In these projects; None means all that the caller may list."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """With these key-value pairs."""
    display_name: Annotated[str, Meta(min_length=1)] | None = None
    """With these words in its name, case-insensitive."""
    owner: SearchOwner = OwnSearchOwner()
    """Of these owners."""
    statuses: Annotated[list[SessionStatusQuery], Meta(min_length=1)] | None = None
    """In any of these states; None means all."""
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    """The size of a page, 1 to 200."""
    cursor: SessionSearchCursor | None = None
    """The previous page's `next_cursor`."""


# A state unknown to this version is decoded as None, like a state unknown to the server.
if TYPE_CHECKING:
    _OpenStatus: TypeAlias = SessionStatus
else:
    _OpenStatus = open_union("status", SessionStatus, ignore_unknown)


class SessionSummary(Reply):
    """A session in search results."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: _OpenStatus | None = None
    """Its state; None if unknown."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Reply):
    """A page of results, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
    """For the next page; None if this is the last."""
