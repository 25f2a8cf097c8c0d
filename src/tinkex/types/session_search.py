"""How a session is doing, or how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, field

from tinkex.types.base import Message, Reply
from tinkex.types.open_types import ignore_unknown, open_union


class SessionFailedRequestReason(Reply, tag="request"):
    """A request failed the session."""

    type: ClassVar[Literal["request"]] = "request"

    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Reply, tag="training_run"):
    """A training run failed the session."""

    type: ClassVar[Literal["training_run"]] = "training_run"

    training_run_id: str


class SessionFailedSamplingSessionReason(Reply, tag="sampling_session"):
    """A sampling session failed the session."""

    type: ClassVar[Literal["sampling_session"]] = "sampling_session"

    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(Reply, tag="failed"):
    """Something in the session failed it."""

    type: ClassVar[Literal["failed"]] = "failed"

    category: Literal["user", "internal"]
    """Whose fault it was."""
    reason: SessionFailedReason
    """What failed."""
    message: str


class SessionCancelled(Reply, tag="cancelled"):
    """Somebody stopped the session from the console."""

    type: ClassVar[Literal["cancelled"]] = "cancelled"

    detail: str | None = None


class ClientSessionFinishSuccess(Reply, tag="success"):
    """The client ended well."""

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
    """The client said that it was done."""

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
    """Everybody's sessions, as far as the caller may see them."""

    type: ClassVar[Literal["accessible"]] = "accessible"


class UserSearchOwner(Message, tag="user"):
    """The sessions of certain users."""

    type: ClassVar[Literal["user"]] = "user"

    owner_urns: Annotated[list[str], Meta(min_length=1, max_length=10)]
    """Whose, 1 to 10."""


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Message, tag="active"):
    """Sessions that are running."""

    type: ClassVar[Literal["active"]] = "active"


class CancelledSessionStatusQuery(Message, tag="cancelled"):
    """Sessions that somebody stopped from the console."""

    type: ClassVar[Literal["cancelled"]] = "cancelled"


class FailedSessionStatusQuery(Message, tag="failed"):
    """Sessions that something in them failed."""

    type: ClassVar[Literal["failed"]] = "failed"


class ClientFinishedSessionStatusQuery(Message, tag="client_finished"):
    """Sessions whose client said that it was done."""

    type: ClassVar[Literal["client_finished"]] = "client_finished"

    reasons: Annotated[list[ClientSessionFinishReasonType], Meta(min_length=1)] | None = None
    """How the client ended; None is any way."""


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Reply):
    """Where the next page begins; hand it back as it came."""

    last_created_at: Annotated[datetime, Meta(tz=True)]
    last_session_id: str


class SessionSearchRequest(Message):
    """Ask for sessions; all conditions must hold, but of an id and a name one is enough."""

    session_id: str | None = None
    """This session."""
    project_ids: list[str] | None = None
    """In these projects; None is all the caller may list."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """With these key-value pairs."""
    display_name: Annotated[str, Meta(min_length=1)] | None = None
    """With these words in its name, whatever their case."""
    owner: SearchOwner = OwnSearchOwner()
    """Of these owners."""
    statuses: Annotated[list[SessionStatusQuery], Meta(min_length=1)] | None = None
    """In any of these states; None is every state."""
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    """The size of a page, 1 to 200."""
    cursor: SessionSearchCursor | None = None
    """The previous page's `next_cursor`."""


# A state that this version does not know reads as None, like one that the server does not know.
if TYPE_CHECKING:
    _OpenStatus: TypeAlias = SessionStatus
else:
    _OpenStatus = open_union("status", SessionStatus, ignore_unknown)


class SessionSummary(Reply):
    """What a search tells about a session."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: _OpenStatus | None = None
    """How it is doing; None if that is not known."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Reply):
    """A page of what was found, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
    """For the next page; None if this is the last."""
