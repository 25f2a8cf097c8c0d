"""Messages about sessions, sampling sessions and client settings."""

from __future__ import annotations

from typing import Any, Literal

from tinkex.types.base import Message, Reply
from tinkex.types.training import ModelID


class CreateSessionRequest(Message):
    """Request a session, the owner of models and sampling sessions."""

    tags: list[str]
    user_metadata: dict[str, Any] | None
    """Stored with the session."""
    sdk_version: str
    project_id: str | None = None
    """The project the session belongs to."""
    display_name: str | None = None
    """A name for people."""
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Reply):
    """The new session, and messages of the server to the user."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Message):
    """Heartbeat of a session's client."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Reply):
    """The heartbeat was received."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class CreateSamplingSessionRequest(Message):
    """Request a sampling session for a base model or a checkpoint."""

    session_id: str
    """The session that owns it."""
    sampling_session_seq_id: int
    """Its sequence number within the session."""
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
    """Request a client number within a shared sampling session."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Reply):
    """The client number; the first client of a sampling session is 0."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Reply):
    """The model of a sampling session."""

    sampler_id: str
    """The sampling session's id."""
    base_model: str
    """The base model."""
    model_path: str | None = None
    """The weights on top of it."""
    tokenizer_id: str | None = None
    """The tokenizer's name or folder; only from tinkex servers."""


class GetSessionResponse(Reply):
    """The contents of a session."""

    training_run_ids: list[ModelID]
    """Its training runs."""
    sampler_ids: list[str]
    """Its sampling sessions."""
    user_metadata: dict[str, str] | None = None
    """Metadata set by its owner."""
    display_name: str | None = None
    """A name for people."""


class ListSessionsResponse(Reply):
    """A page of session ids."""

    sessions: list[str]


class ClientConfigRequest(Message):
    """Request the settings for this SDK version."""

    sdk_version: str


class ClientConfigResponse(Reply):
    """Settings that a client reads once."""

    pjwt_auth_enabled: bool = False
    """Exchange the credential for short-lived tokens."""
    credential_default_source: str = "api_key"
    """`credential_cmd` prefers the credential command over a key."""
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    """Maximum bytes of prompts in flight to the server."""
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    """Maximum bytes of large results in flight."""
    parallel_fwdbwd_chunks: bool = True
    """Send the chunks of a batch concurrently, the first one last."""
    proto_compress_fwdbwd: bool = False
    """Compress forward_backward requests with zstd."""
    fwdbwd_max_chunk_len: int = 1024
    """Maximum number of examples per chunk."""
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    """Maximum bytes per chunk, before compression."""
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    """Maximum bytes of chunks in flight to the server."""
    billing_exception_max_pause_duration_sec: int = 60 * 60
    """How long to wait for a billing issue to be resolved."""
    sample_no_retries: bool = False
    """Do not retry samples."""
    sample_enable_stuck_detection: bool = True
    """Fail if no sample makes progress for a long time."""
    sample_max_concurrent_requests: int = 2000
    """Maximum number of samples in flight; overrides the caller's limit."""
    use_pyqwest_transport: bool = True
    """Which HTTP library the official client uses."""
    create_model_via_load_weights: bool = False
    """Create a model from a checkpoint with one load_weights request."""
    sample_use_retrieve_futures: bool = False
    """Poll the futures of a sampling session with one request."""
    custom_loss_server_side: bool = False
    """Run custom losses on the server."""
    sample_join_sampling_session: bool = False
    """Get the clone numbers of a sampling session from the server."""


class ClientDynamicConfigResponse(Reply):
    """Settings that a client refreshes periodically."""

    refresh_interval_sec: int = 300
    """The refresh interval."""
    sample_cancel_enabled: bool = False
    """Cancel abandoned samples on the server."""
    sample_cancel_max_batch_size: int = 64
    """Maximum number of cancellations per batch."""
