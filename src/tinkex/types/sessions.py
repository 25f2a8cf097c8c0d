"""Sessions: opening one, keeping it alive, and asking the server about it."""

from __future__ import annotations

from typing import Any, Literal

from tinkex.types.base import Message, Reply
from tinkex.types.training import ModelID


class CreateSessionRequest(Message):
    """Ask for a session, the owner of models and samplers."""

    tags: list[str]
    user_metadata: dict[str, Any] | None
    """Kept with the session."""
    sdk_version: str
    project_id: str | None = None
    """The project the session belongs to."""
    display_name: str | None = None
    """A name for people."""
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Reply):
    """The new session, and what the server wants its user to read."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Message):
    """Say that the session's client is alive."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Reply):
    """The server heard it."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class CreateSamplingSessionRequest(Message):
    """Ask for a sampling session on a base model or a checkpoint."""

    session_id: str
    """The session that owns it."""
    sampling_session_seq_id: int
    """Its place among the session's sampling sessions."""
    base_model: str | None = None
    """The base model to sample from."""
    model_path: str | None = None
    """The tinker:// path of the weights to sample from."""
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Reply):
    """The new sampling session."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(Message):
    """Ask for a number of one's own within a sampling session that others use too."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Reply):
    """The number; the first client of a sampling session is 0."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Reply):
    """What a sampling session samples from."""

    sampler_id: str
    """The sampling session's id."""
    base_model: str
    """The base model."""
    model_path: str | None = None
    """The weights on top of it."""
    tokenizer_id: str | None = None
    """The tokenizer's name or folder; only tinkex servers say it."""


class GetSessionResponse(Reply):
    """What belongs to a session."""

    training_run_ids: list[ModelID]
    """Its training runs."""
    sampler_ids: list[str]
    """Its sampling sessions."""
    user_metadata: dict[str, str] | None = None
    """What its owner attached to it."""
    display_name: str | None = None
    """A name for people."""


class ListSessionsResponse(Reply):
    """A page of session ids."""

    sessions: list[str]
