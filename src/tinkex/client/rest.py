"""The REST client: list and manage runs, checkpoints and sessions."""

from __future__ import annotations

import asyncio
import warnings
from datetime import date, datetime

from tinkex import types
from tinkex.client.admin import AdminClient, AuditEvent
from tinkex.client.compat import warn_moved
from tinkex.client.credentials import decode_jwt_claims
from tinkex.client.future import APIFuture
from tinkex.client.rest_base import discard_reply, page_query
from tinkex.client.rest_checkpoints import CheckpointsClient
from tinkex.client.rest_runs import AccessScope, RunsClient
from tinkex.errors import APIResponseValidationError, ConfigError, ExperimentalWarning
from tinkex.wire import endpoints as api
from tinkex.wire.messages import AssignProjectRequest

TRACE_POLL_SECONDS = 5.0


class RestClient(RunsClient, CheckpointsClient):
    """Reads and manages runs, checkpoints and sessions. Every method returns a future."""

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
