"""Searching sessions: whose, in which state, and what was found."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta, field

from tinkex.types.base import Message, Reply
from tinkex.types.open_types import ignore_unknown, open_union
from tinkex.types.session_status import ClientSessionFinishReasonType, SessionStatus


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
