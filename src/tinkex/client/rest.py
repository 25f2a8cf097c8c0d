"""The REST client: list and manage runs, checkpoints and sessions."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Literal

from tinkex import types
from tinkex.client.admin import AdminClient, AuditEvent
from tinkex.client.compat import deprecate_async_names, warn_moved
from tinkex.client.credentials import decode_jwt_claims
from tinkex.client.future import APIFuture
from tinkex.client.rest_base import discard_reply, page_query
from tinkex.client.rest_checkpoints import CheckpointsClient
from tinkex.errors import APIResponseValidationError, ConfigError, ExperimentalWarning
from tinkex.ids import parse_tinker_path
from tinkex.wire import endpoints as api
from tinkex.wire.messages import (
    AssignProjectRequest,
    Empty,
    RenameRunRequest,
    ReportMetricsRequest,
    SetRunTagsRequest,
)

AccessScope = Literal["owned", "accessible"]
TRACE_POLL_SECONDS = 5.0


@deprecate_async_names
class RestClient(CheckpointsClient):
    """Reads and manages runs, checkpoints and sessions. Every method returns a future."""

    # --- training runs --------------------------------------------------------------------

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """Return one training run."""
        ids = {"training_run_id": training_run_id}
        return self._call(api.GET_RUN, ids, query={"access_scope": access_scope})

    async def get_training_run_async(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """Async version of get_training_run()."""
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """Return the training run of a checkpoint."""
        return self.get_training_run(parse_tinker_path(tinker_path).run_id, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """Async version of get_training_run_by_tinker_path()."""
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """List one page of training runs, newest first."""
        return self._call(
            api.LIST_RUNS,
            query=page_query(limit, offset)
            | {"access_scope": access_scope, "project_id": project_id},
        )

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        """Async version of list_training_runs()."""
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    def get_run_metrics(
        self, training_run_id: types.ModelID, limit: int = 100, after: int | None = None
    ) -> APIFuture[types.RunMetricsResponse]:
        """Return metrics of the newest steps, or of the first after a cursor. tinkex servers only.

        `after=0` starts with the oldest stored step; then pass the cursor of the last step.
        """
        query = {"limit": page_query(limit, 0)["limit"], "after": after}
        return self._call(api.RUN_METRICS, {"training_run_id": training_run_id}, query=query)

    async def get_run_metrics_async(
        self, training_run_id: types.ModelID, limit: int = 100, after: int | None = None
    ) -> types.RunMetricsResponse:
        """Async version of get_run_metrics()."""
        return await self.get_run_metrics(training_run_id, limit, after)

    def find_training_runs(
        self,
        search: str,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """Find runs whose id starts with or whose name contains a string. tinkex servers only."""
        filters = {"access_scope": access_scope, "project_id": project_id, "search": search}
        return self._call(api.LIST_RUNS, query=page_query(limit, offset) | filters)

    def rename_training_run(
        self, training_run_id: types.ModelID, name: str | None
    ) -> APIFuture[Empty]:
        """Set the name of a run, or remove it with None. tinkex servers only."""
        message = RenameRunRequest(name=name)
        return self._call(api.RENAME_RUN, {"training_run_id": training_run_id}, message)

    def set_training_run_tags(
        self, training_run_id: types.ModelID, tags: Sequence[str]
    ) -> APIFuture[Empty]:
        """Replace the tags of a run; those of its session stay. tinkex servers only."""
        message = SetRunTagsRequest(tags=list(tags))
        return self._call(api.SET_RUN_TAGS, {"training_run_id": training_run_id}, message)

    def report_run_metrics(
        self, training_run_id: types.ModelID, seq_id: int, metrics: Mapping[str, float]
    ) -> APIFuture[Empty]:
        """Add metrics to a finished optimizer step. tinkex servers only.

        `seq_id` is the seq_id of the future that optim_step() returned.
        """
        message = ReportMetricsRequest(seq_id=seq_id, metrics=dict(metrics))
        return self._call(api.REPORT_RUN_METRICS, {"training_run_id": training_run_id}, message)

    # --- sessions and samplers ------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.GetSessionResponse]:
        """Return the training runs and samplers of a session."""
        return self._call(
            api.GET_SESSION, {"session_id": session_id}, query={"access_scope": access_scope}
        )

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> types.GetSessionResponse:
        """Async version of get_session()."""
        return await self.get_session(session_id, access_scope)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.ListSessionsResponse]:
        """List one page of session ids, newest first."""
        return self._call(
            api.LIST_SESSIONS, query=page_query(limit, offset) | {"access_scope": access_scope}
        )

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> types.ListSessionsResponse:
        """Async version of list_sessions()."""
        return await self.list_sessions(limit, offset, access_scope)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session into a project."""
        message = AssignProjectRequest(project_id=project_id)
        return discard_reply(self._call(api.ASSIGN_PROJECT, {"session_id": session_id}, message))

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        """Async version of assign_session_project()."""
        await self.assign_session_project(session_id, project_id)

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """Export a session's timeline as a Perfetto trace; resolves to its URL."""
        return self.holder.start(self._export_trace({"session_id": session_id}))

    async def export_session_trace_async(self, session_id: str) -> str:
        """Async version of export_session_trace()."""
        return await self.export_session_trace(session_id)

    async def _export_trace(self, ids: dict[str, str]) -> str:
        await self.holder.ready()
        while True:
            reply = await self.holder.transport.call(api.TRACE_EXPORT, ids=ids)
            if reply.status == "ready" and reply.url:
                return reply.url
            if reply.status != "pending":
                reason = reply.error or f"status {reply.status}"
                raise APIResponseValidationError(None, None, f"The trace export failed: {reason}")
            await asyncio.sleep(TRACE_POLL_SECONDS)

    def search_sessions(
        self, request: types.SessionSearchRequest
    ) -> APIFuture[types.SessionSearchResponse]:
        """Search sessions, newest first. Experimental: the API may change."""
        warnings.warn("search_sessions() is experimental", ExperimentalWarning, stacklevel=2)
        return self._call(api.SEARCH_SESSIONS, message=request)

    async def search_sessions_async(
        self, request: types.SessionSearchRequest
    ) -> types.SessionSearchResponse:
        """Async version of search_sessions()."""
        return await self.search_sessions(request)

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """Return the base model and weights of a sampler."""
        return self._call(api.GET_SAMPLER, {"sampler_id": sampler_id})

    async def get_sampler_async(self, sampler_id: str) -> types.GetSamplerResponse:
        """Async version of get_sampler()."""
        return await self.get_sampler(sampler_id)

    def whoami(self) -> APIFuture[types.WhoamiResponse]:
        """Return the user and organisation of this credential, from its token."""
        return self.holder.start(self._whoami())

    async def _whoami(self) -> types.WhoamiResponse:
        await self.holder.ready()
        claims = decode_jwt_claims(await self.holder.identity.get_token())
        missing = [name for name in ("sub", "org_id") if not claims.get(name)]
        if missing:
            raise ConfigError(f"The server's token does not identify you: no {missing[0]!r} claim")
        return types.WhoamiResponse(
            user_urn=str(claims["sub"]),
            org_urn=f"tml:organization:{claims['org_id']}",
            email=str(claims["email"]) if claims.get("email") else None,
        )

    # --- moved to AdminClient, deprecated -------------------------------------------------

    def get_audit_log(
        self, event_type: AuditEvent = "all", day: date | None = None
    ) -> APIFuture[types.AuditLogResponse]:
        """Moved to AdminClient.get_audit_log()."""
        return self._admin_client("get_audit_log").get_audit_log(event_type, day)

    async def get_audit_log_async(
        self, event_type: AuditEvent = "all", day: date | None = None
    ) -> types.AuditLogResponse:
        """Moved to AdminClient.get_audit_log_async()."""
        return await self._admin_client("get_audit_log_async").get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[types.BillingUsageResponse]:
        """Moved to AdminClient.get_billing_usage()."""
        return self._admin_client("get_billing_usage").get_billing_usage(starting_on, ending_before)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> types.BillingUsageResponse:
        """Moved to AdminClient.get_billing_usage_async()."""
        admin = self._admin_client("get_billing_usage_async")
        return await admin.get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Moved to AdminClient.get_current_checkpoint_storage_usage()."""
        admin = self._admin_client("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> types.CurrentCheckpointStorageUsageResponse:
        """Moved to AdminClient.get_current_checkpoint_storage_usage_async()."""
        admin = self._admin_client("get_current_checkpoint_storage_usage_async")
        return await admin.get_current_checkpoint_storage_usage(project_id)

    def _admin_client(self, method: str) -> AdminClient:
        warn_moved(f"RestClient.{method}()", f"AdminClient.{method}()", stacklevel=4)
        return AdminClient(self.holder)
