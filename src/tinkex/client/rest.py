"""The REST client: list and manage runs, checkpoints and sessions."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path

from tinkex import types
from tinkex.client.admin import AdminClient, AuditEvent
from tinkex.client.compat import warn_moved
from tinkex.client.credentials import decode_jwt_claims
from tinkex.client.download.checkpoint import DownloadOptions, download_archive, download_checkpoint
from tinkex.client.future import APIFuture, map_future
from tinkex.client.rest_base import page_query
from tinkex.client.rest_runs import AccessScope, RunsClient
from tinkex.errors import APIResponseValidationError, ConfigError, ExperimentalWarning
from tinkex.ids import TinkerPath, check_ttl, parse_tinker_path
from tinkex.wire import endpoints as api
from tinkex.wire.messages import AssignProjectRequest, Empty, WeightsInfoRequest

TRACE_POLL_SECONDS = 5.0


class RestClient(RunsClient):
    """Reads and manages runs, checkpoints and sessions. Every method returns a future."""

    # --- checkpoints ----------------------------------------------------------------------

    def list_checkpoints(
        self, training_run_id: types.ModelID
    ) -> APIFuture[types.CheckpointsListResponse]:
        """List the checkpoints of one run."""
        return self._call(api.LIST_CHECKPOINTS, {"training_run_id": training_run_id})

    async def list_checkpoints_async(
        self, training_run_id: types.ModelID
    ) -> types.CheckpointsListResponse:
        """Async version of list_checkpoints()."""
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[types.CheckpointsListResponse]:
        """List one page of all your checkpoints, newest first."""
        return self._call(api.LIST_USER_CHECKPOINTS, query=page_query(limit, offset))

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> types.CheckpointsListResponse:
        """Async version of list_user_checkpoints()."""
        return await self.list_user_checkpoints(limit, offset)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[types.WeightsInfoResponse]:
        """Return base model, rank and trained layers of a checkpoint."""
        parse_tinker_path(tinker_path)
        return self._call(api.WEIGHTS_INFO, message=WeightsInfoRequest(tinker_path=tinker_path))

    def get_external_weights_urls(
        self, tinker_path: str
    ) -> APIFuture[types.ExternalWeightsUrlsResponse]:
        """Return temporary URLs of the files of an external checkpoint."""
        return self._call(
            api.EXTERNAL_WEIGHTS_URLS, _checkpoint_ids(parse_tinker_path(tinker_path))
        )

    async def get_external_weights_urls_async(
        self, tinker_path: str
    ) -> types.ExternalWeightsUrlsResponse:
        """Async version of get_external_weights_urls()."""
        return await self.get_external_weights_urls(tinker_path)

    def download_checkpoint(
        self,
        tinker_path: str,
        destination: str | Path,
        *,
        force: bool = False,
        extract: bool = True,
        progress: Callable[[int, int | None], None] | None = None,
        unpacked: Callable[[int, int | None], None] | None = None,
        identity: str | Path | None = None,
    ) -> APIFuture[Path]:
        """Download a checkpoint into a new directory: resumable, verified and atomic.

        Without `extract` it is downloaded as one archive, and `destination` is a file. `progress`
        receives byte counts, `unpacked` the number of files extracted from an archive. `identity`
        is an age identity file or an SSH private key that decrypts an encrypted checkpoint.
        """
        path = parse_tinker_path(tinker_path)
        options = DownloadOptions(
            destination=Path(destination),
            force=force,
            progress=progress,
            unpack_progress=unpacked,
            identity=None if identity is None else Path(identity),
        )
        fetch = download_checkpoint if extract else download_archive
        return self.holder.start(fetch(self.holder, path, options))

    def delete_checkpoint(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> APIFuture[None]:
        """Delete a checkpoint permanently."""
        ids = {"training_run_id": training_run_id, "checkpoint_id": checkpoint_id}
        return _discard_reply(self._call(api.DELETE_CHECKPOINT, ids))

    async def delete_checkpoint_async(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> None:
        """Async version of delete_checkpoint()."""
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete the checkpoint at a path permanently."""
        return _discard_reply(
            self._call(api.DELETE_CHECKPOINT, _checkpoint_ids(parse_tinker_path(tinker_path)))
        )

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Async version of delete_checkpoint_from_tinker_path()."""
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint public."""
        return _discard_reply(
            self._call(api.PUBLISH_CHECKPOINT, _checkpoint_ids(parse_tinker_path(tinker_path)))
        )

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Async version of publish_checkpoint_from_tinker_path()."""
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a published checkpoint private again."""
        return _discard_reply(
            self._call(api.UNPUBLISH_CHECKPOINT, _checkpoint_ids(parse_tinker_path(tinker_path)))
        )

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Async version of unpublish_checkpoint_from_tinker_path()."""
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Set the seconds after which a checkpoint expires; None means never."""
        check_ttl(ttl_seconds)
        ids = _checkpoint_ids(parse_tinker_path(tinker_path))
        # A plain dict: the codec omits None in typed messages, but here null must be sent.
        return _discard_reply(self._call(api.SET_CHECKPOINT_TTL, ids, {"ttl_seconds": ttl_seconds}))

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        """Async version of set_checkpoint_ttl_from_tinker_path()."""
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project; resolves to the path of the copy."""
        parse_tinker_path(path)
        check_ttl(ttl_seconds)
        message = types.CopyWeightsRequest(
            source_path=path,
            destination_project_id=destination_project_id,
            ttl_seconds=ttl_seconds,
        )
        token = weights_access_token
        headers = {"x-tinker-weights-access-token": token} if token else {}
        copied = self._call(api.COPY_WEIGHTS, message=message, headers=headers)
        return map_future(copied, lambda reply: reply.tinker_path)

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        """Async version of copy_weights()."""
        return await self.copy_weights(
            path,
            destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

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
        return _discard_reply(self._call(api.ASSIGN_PROJECT, {"session_id": session_id}, message))

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


def _checkpoint_ids(path: TinkerPath) -> dict[str, str]:
    return {"training_run_id": path.run_id, "checkpoint_id": path.checkpoint_id}


def _discard_reply(future: APIFuture[Empty]) -> APIFuture[None]:
    return map_future(future, lambda reply: None)
