"""The endpoint table of the Tinker API, shared by client and server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex import types
from tinkex.types.billing import QuotaUsageResponse
from tinkex.wire.endpoint import LARGE_BODY_ENDPOINTS as LARGE_BODY_ENDPOINTS
from tinkex.wire.endpoint import PREFIX as PREFIX
from tinkex.wire.endpoint import SMALL_BODY_BYTES as SMALL_BODY_BYTES
from tinkex.wire.endpoint import BodyFormat as BodyFormat
from tinkex.wire.endpoint import Endpoint as Endpoint
from tinkex.wire.endpoint import JobEndpoint as JobEndpoint
from tinkex.wire.endpoint import no_body, post_job, post_json
from tinkex.wire.messages import (
    AliasMessage,
    AliasReply,
    ApiKeyReply,
    ArchiveReply,
    AssignProjectRequest,
    CancelFutureRequest,
    Empty,
    FinishSessionRequest,
    ListAliasesReply,
    RenameRunRequest,
    ReportMetricsRequest,
    SetRunTagsRequest,
    TokenizerReply,
    TraceExportReply,
    TtlRequest,
    WeightsInfoRequest,
)

_SCOPE_QUERY = frozenset({"access_scope"})
_PAGE_QUERY = frozenset({"limit", "offset"})
_TOKENIZER_QUERY = frozenset({"base_model", "digest"})

# --- start-up and sessions -----------------------------------------------------------------
HEALTH = no_body("GET", "health", "/healthz", types.HealthResponse, timeout_seconds=5.0)
CAPABILITIES = no_body(
    "GET",
    "get_server_capabilities",
    "/get_server_capabilities",
    types.GetServerCapabilitiesResponse,
)
CLIENT_CONFIG = post_json(
    "client_config",
    "/client/config",
    types.ClientConfigRequest,
    types.ClientConfigResponse,
    # The first request: an unresponsive server must be reported soon.
    timeout_seconds=10.0,
)
DYNAMIC_CONFIG = post_json(
    "client_dynamic_config",
    "/client/dynamic_config",
    types.ClientConfigRequest,
    types.ClientDynamicConfigResponse,
    timeout_seconds=10.0,
)
AUTH_TOKEN = post_json("auth_token", "/auth/token", Empty, types.AuthTokenResponse)
API_KEY = no_body("GET", "get_api_key", "/auth/apikey/me", ApiKeyReply, timeout_seconds=30.0)
DELETE_API_KEY = no_body("DELETE", "delete_api_key", "/auth/apikey/me", Empty, timeout_seconds=30.0)
CREATE_SESSION = post_json(
    "create_session", "/create_session", types.CreateSessionRequest, types.CreateSessionResponse
)
HEARTBEAT = post_json(
    "session_heartbeat",
    "/session_heartbeat",
    types.SessionHeartbeatRequest,
    types.SessionHeartbeatResponse,
    timeout_seconds=10.0,
)
FINISH_SESSION = post_json(
    "finish_session",
    "/sessions/{session_id}/finish",
    FinishSessionRequest,
    Empty,
    timeout_seconds=10.0,
)
TELEMETRY = post_json(
    "telemetry",
    "/telemetry",
    types.TelemetrySendRequest,
    types.TelemetryResponse,
    timeout_seconds=5.0,
    max_body_bytes=4 * SMALL_BODY_BYTES,
)

# --- futures -------------------------------------------------------------------------------
RETRIEVE_FUTURE = post_json(
    "retrieve_future",
    "/retrieve_future",
    types.FutureRetrieveRequest,
    Empty,
    timeout_seconds=45.0,
    is_long_poll=True,
)
RETRIEVE_FUTURES = post_json(
    "retrieve_futures",
    "/retrieve_futures",
    types.FuturesRetrieveRequest,
    types.FuturesRetrieveResponse,
    timeout_seconds=45.0,
    is_long_poll=True,
)
CANCEL_FUTURE = post_json(
    "cancel_future", "/cancel_future", CancelFutureRequest, Empty, timeout_seconds=30.0
)

# --- training ------------------------------------------------------------------------------
CREATE_MODEL = post_job(
    "create_model", types.CreateModelRequest, types.CreateModelResponse, "CreateModel"
)
FORWARD_BACKWARD = post_job(
    "forward_backward",
    types.ForwardBackwardRequest,
    types.ForwardBackwardOutput,
    "ForwardBackward",
    body=BodyFormat.PROTO,
)
FORWARD = post_job(
    "forward", types.ForwardRequest, types.ForwardBackwardOutput, "Forward", is_legacy=True
)
OPTIM_STEP = post_job("optim_step", types.OptimStepRequest, types.OptimStepResponse, "OptimStep")
SAVE_WEIGHTS = post_job(
    "save_weights", types.SaveWeightsRequest, types.SaveWeightsResponse, "SaveWeights"
)
SAVE_WEIGHTS_FOR_SAMPLER = post_job(
    "save_weights_for_sampler",
    types.SaveWeightsForSamplerRequest,
    types.SaveWeightsForSamplerResponseInternal,
    "SaveWeightsForSampler",
)
SAVE_WEIGHTS_EXTERNAL = post_job(
    "save_weights_external",
    types.SaveWeightsExternalRequest,
    types.SaveWeightsExternalResponseInternal,
    "SaveWeightsExternal",
)
LOAD_WEIGHTS = post_job(
    "load_weights", types.LoadWeightsRequest, types.LoadWeightsResponse, "LoadWeights"
)
CREATE_CUSTOM_LOSS = post_job(
    "create_custom_loss",
    types.CreateCustomLossRequest,
    types.CreateCustomLossResponse,
    "CreateCustomLoss",
)
GET_INFO = post_json("get_info", "/get_info", types.GetInfoRequest, types.GetInfoResponse)
UNLOAD_MODEL = post_job(
    "unload_model",
    types.UnloadModelRequest,
    types.UnloadModelResponse,
    "UnloadModel",
    is_legacy=True,
)

# --- sampling ------------------------------------------------------------------------------
CREATE_SAMPLING_SESSION = post_json(
    "create_sampling_session",
    "/create_sampling_session",
    types.CreateSamplingSessionRequest,
    types.CreateSamplingSessionResponse,
)
JOIN_SAMPLING_SESSION = post_json(
    "join_sampling_session",
    "/join_sampling_session",
    types.JoinSamplingSessionRequest,
    types.JoinSamplingSessionResponse,
)
SAMPLE = post_job("asample", types.SampleRequest, types.SampleResponse, "Sample")
GET_SAMPLER = no_body("GET", "get_sampler", "/samplers/{sampler_id}", types.GetSamplerResponse)
GET_TOKENIZER = no_body(
    "GET",
    "get_tokenizer",
    "/tokenizer",
    TokenizerReply,
    query=_TOKENIZER_QUERY,
    is_tinkex_only=True,
)

# --- training runs and checkpoints ---------------------------------------------------------
LIST_RUNS = no_body(
    "GET",
    "list_training_runs",
    "/training_runs",
    types.TrainingRunsResponse,
    query=_PAGE_QUERY | _SCOPE_QUERY | {"project_id", "search"},
)
GET_RUN = no_body(
    "GET",
    "get_training_run",
    "/training_runs/{training_run_id}",
    types.TrainingRun,
    query=_SCOPE_QUERY,
)
RUN_METRICS = no_body(
    "GET",
    "get_run_metrics",
    "/training_runs/{training_run_id}/metrics",
    types.RunMetricsResponse,
    query=frozenset({"limit", "after"}),
    is_tinkex_only=True,
)
REPORT_RUN_METRICS = post_json(
    "report_run_metrics",
    "/training_runs/{training_run_id}/metrics",
    ReportMetricsRequest,
    Empty,
    timeout_seconds=10.0,
    is_tinkex_only=True,
)
RENAME_RUN = post_json(
    "rename_training_run",
    "/training_runs/{training_run_id}/name",
    RenameRunRequest,
    Empty,
    method="PUT",
    is_tinkex_only=True,
)
SET_RUN_TAGS = post_json(
    "set_training_run_tags",
    "/training_runs/{training_run_id}/tags",
    SetRunTagsRequest,
    Empty,
    method="PUT",
    is_tinkex_only=True,
)
LIST_CHECKPOINTS = no_body(
    "GET",
    "list_checkpoints",
    "/training_runs/{training_run_id}/checkpoints",
    types.CheckpointsListResponse,
)
LIST_MODEL_CHECKPOINTS = no_body(
    "GET",
    "list_model_checkpoints",
    "/models/{training_run_id}/checkpoints",
    types.CheckpointsListResponse,
    is_legacy=True,
)
LIST_USER_CHECKPOINTS = no_body(
    "GET", "list_user_checkpoints", "/checkpoints", types.CheckpointsListResponse, query=_PAGE_QUERY
)
SEARCH_CHECKPOINTS = post_json(
    "search_checkpoints",
    "/checkpoints/search",
    types.CheckpointSearchRequest,
    types.CheckpointSearchResponse,
)
_CHECKPOINT_PATH = "/training_runs/{training_run_id}/checkpoints/{checkpoint_id}"
DELETE_CHECKPOINT = no_body(
    "DELETE",
    "delete_checkpoint",
    _CHECKPOINT_PATH,
    Empty,
    retries_conflict=False,
    success_after_retry=frozenset({404}),
)
PUBLISH_CHECKPOINT = no_body(
    "POST",
    "publish_checkpoint",
    _CHECKPOINT_PATH + "/publish",
    Empty,
    retries_conflict=False,
    success_after_retry=frozenset({409}),
)
UNPUBLISH_CHECKPOINT = no_body(
    "DELETE",
    "unpublish_checkpoint",
    _CHECKPOINT_PATH + "/publish",
    Empty,
    retries_conflict=False,
    success_after_retry=frozenset({409}),
)
SET_ALIAS = post_json(
    "set_alias", "/aliases", AliasMessage, AliasReply, method="PUT", is_tinkex_only=True
)
LIST_ALIASES = no_body("GET", "list_aliases", "/aliases", ListAliasesReply, is_tinkex_only=True)
DELETE_ALIAS = no_body(
    "DELETE",
    "delete_alias",
    "/aliases/{alias}",
    Empty,
    success_after_retry=frozenset({404}),
    is_tinkex_only=True,
)
SET_CHECKPOINT_TTL = post_json(
    "set_checkpoint_ttl",
    _CHECKPOINT_PATH + "/ttl",
    TtlRequest,
    Empty,
    method="PUT",
    retries_conflict=False,
)
EXTERNAL_WEIGHTS_URLS = no_body(
    "GET",
    "external_weights_urls",
    _CHECKPOINT_PATH + "/external_weights_urls",
    types.ExternalWeightsUrlsResponse,
)
CHECKPOINT_ARCHIVE = no_body(
    "GET", "checkpoint_archive", _CHECKPOINT_PATH + "/archive", ArchiveReply, is_legacy=True
)
WEIGHTS_INFO = post_json(
    "weights_info", "/weights_info", WeightsInfoRequest, types.WeightsInfoResponse
)
COPY_WEIGHTS = post_json(
    "copy_weights", "/copy_weights", types.CopyWeightsRequest, types.CopyWeightsResponse
)

# --- sessions, audit, usage ----------------------------------------------------------------
LIST_SESSIONS = no_body(
    "GET",
    "list_sessions",
    "/sessions",
    types.ListSessionsResponse,
    query=_PAGE_QUERY | _SCOPE_QUERY,
)
GET_SESSION = no_body(
    "GET", "get_session", "/sessions/{session_id}", types.GetSessionResponse, query=_SCOPE_QUERY
)
ASSIGN_PROJECT = post_json(
    "assign_session_project",
    "/sessions/{session_id}/project",
    AssignProjectRequest,
    Empty,
    method="PUT",
    retries_conflict=False,
)
TRACE_EXPORT = no_body(
    "GET", "export_session_trace", "/sessions/{session_id}/trace_export", TraceExportReply
)
SEARCH_SESSIONS = post_json(
    "search_sessions", "/sessions/search", types.SessionSearchRequest, types.SessionSearchResponse
)
AUDIT_LOG = no_body(
    "GET", "get_audit_log", "/audit", types.AuditLogResponse, query=frozenset({"event_type", "day"})
)
BILLING_USAGE = no_body(
    "GET",
    "get_billing_usage",
    "/billing/usage/events",
    types.BillingUsageResponse,
    query=frozenset({"starting_on", "ending_before"}),
)
STORAGE_USAGE = no_body(
    "GET",
    "get_current_checkpoint_storage_usage",
    "/billing/usage/checkpoints/current",
    types.CurrentCheckpointStorageUsageResponse,
    query=frozenset({"project_id"}),
)
QUOTAS = no_body("GET", "get_quotas", "/usage/quotas", QuotaUsageResponse, is_tinkex_only=True)

ENDPOINTS: Mapping[str, Endpoint[Any, Any]] = {
    row.name: row for row in list(globals().values()) if isinstance(row, Endpoint)
}
"""All endpoints by name."""
