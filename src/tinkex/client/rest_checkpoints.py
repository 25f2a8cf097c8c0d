"""REST methods for checkpoints: list, download, delete, publish, copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from tinkex import types
from tinkex.client.compat import deprecate_async_names
from tinkex.client.download.checkpoint import (
    DownloadOptions,
    checkpoint_ids,
    download_archive,
    download_checkpoint,
)
from tinkex.client.future import APIFuture, map_future
from tinkex.client.rest_base import SessionlessClient, discard_reply, page_query
from tinkex.errors import ExperimentalWarning
from tinkex.ids import check_ttl, parse_tinker_path
from tinkex.wire import endpoints as api
from tinkex.wire.messages import AliasMessage, AliasReply, WeightsInfoRequest


@deprecate_async_names
class CheckpointsClient(SessionlessClient):
    """The methods of RestClient for checkpoints."""

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

    def search_checkpoints(
        self, request: types.CheckpointSearchRequest
    ) -> APIFuture[types.CheckpointSearchResponse]:
        """Search your checkpoints, newest first. Experimental: the API may change."""
        warnings.warn("search_checkpoints() is experimental", ExperimentalWarning, stacklevel=2)
        return self._call(api.SEARCH_CHECKPOINTS, message=request)

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
        return self._call(api.EXTERNAL_WEIGHTS_URLS, checkpoint_ids(parse_tinker_path(tinker_path)))

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
        return discard_reply(self._call(api.DELETE_CHECKPOINT, ids))

    async def delete_checkpoint_async(
        self, training_run_id: types.ModelID, checkpoint_id: str
    ) -> None:
        """Async version of delete_checkpoint()."""
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete the checkpoint at a path permanently."""
        return discard_reply(
            self._call(api.DELETE_CHECKPOINT, checkpoint_ids(parse_tinker_path(tinker_path)))
        )

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Async version of delete_checkpoint_from_tinker_path()."""
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint public."""
        return discard_reply(
            self._call(api.PUBLISH_CHECKPOINT, checkpoint_ids(parse_tinker_path(tinker_path)))
        )

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Async version of publish_checkpoint_from_tinker_path()."""
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a published checkpoint private again."""
        return discard_reply(
            self._call(api.UNPUBLISH_CHECKPOINT, checkpoint_ids(parse_tinker_path(tinker_path)))
        )

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Async version of unpublish_checkpoint_from_tinker_path()."""
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Set the seconds after which a checkpoint expires; None means never."""
        check_ttl(ttl_seconds)
        ids = checkpoint_ids(parse_tinker_path(tinker_path))
        # A plain dict: the codec omits None in typed messages, but here null must be sent.
        return discard_reply(self._call(api.SET_CHECKPOINT_TTL, ids, {"ttl_seconds": ttl_seconds}))

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        """Async version of set_checkpoint_ttl_from_tinker_path()."""
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def set_alias(self, tinker_path: str, name: str) -> APIFuture[AliasReply]:
        """Name a checkpoint for clients of the OpenAI and Anthropic APIs; moves an existing name.

        Resolves to the name, its path and the path that it meant before.
        """
        parse_tinker_path(tinker_path)
        return self._call(api.SET_ALIAS, message=AliasMessage(name=name, tinker_path=tinker_path))

    def list_aliases(self) -> APIFuture[dict[str, str]]:
        """Return the paths of your aliases, by name."""
        listed = self._call(api.LIST_ALIASES)
        return map_future(
            listed, lambda reply: {each.name: each.tinker_path for each in reply.aliases}
        )

    def delete_alias(self, name: str) -> APIFuture[None]:
        """Remove an alias; its checkpoint stays."""
        return discard_reply(self._call(api.DELETE_ALIAS, {"alias": name}))

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
