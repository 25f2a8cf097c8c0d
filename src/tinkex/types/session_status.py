"""How a session is doing, or how it ended."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from tinkex.types.base import Reply


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
