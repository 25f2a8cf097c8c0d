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


class ClientConfigRequest(Message):
    """Ask for the settings meant for this version."""

    sdk_version: str


class ClientConfigResponse(Reply):
    """Settings for a client's whole life."""

    pjwt_auth_enabled: bool = False
    """Exchange the credential for short-lived tokens."""
    credential_default_source: str = "api_key"
    """`credential_cmd` prefers the credential command over a key."""
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    """How many bytes of prompts may be under way to the server."""
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    """How many bytes of large results may be fetched at once."""
    parallel_fwdbwd_chunks: bool = True
    """Send the parts of a batch together, the first one last."""
    proto_compress_fwdbwd: bool = False
    """Compress forward_backward requests with zstd."""
    fwdbwd_max_chunk_len: int = 1024
    """The most examples of a part."""
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    """The most bytes of a part, before compression."""
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    """How many bytes of parts may be under way to the server."""
    billing_exception_max_pause_duration_sec: int = 60 * 60
    """How long to wait for a billing issue to be solved."""
    sample_no_retries: bool = False
    """Do not retry samples."""
    sample_enable_stuck_detection: bool = True
    """Give up when no sample makes progress for long."""
    sample_max_concurrent_requests: int = 2000
    """How many samples may be under way; overrides the caller's own limit."""
    use_pyqwest_transport: bool = True
    """Which HTTP library the official client uses."""
    create_model_via_load_weights: bool = False
    """Make a model from a checkpoint with one load_weights request."""
    sample_use_retrieve_futures: bool = False
    """Ask for the promises of a sampling session all together."""
    custom_loss_server_side: bool = False
    """Run custom losses on the server."""
    sample_join_sampling_session: bool = False
    """Let the server number the clones of a sampling session."""


class ClientDynamicConfigResponse(Reply):
    """Settings that a living client asks for again and again."""

    refresh_interval_sec: int = 300
    """How often to ask."""
    sample_cancel_enabled: bool = False
    """Tell the server about samples that nobody waits for any more."""
    sample_cancel_max_batch_size: int = 64
    """How many of them to tell at once."""
