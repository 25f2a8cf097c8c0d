"""Methods of the training client that save and load checkpoints."""

from __future__ import annotations

from tinkex import types
from tinkex.client.compat import deprecate_async_names, warn_moved
from tinkex.client.future import APIFuture, map_future
from tinkex.client.holder import Holder
from tinkex.client.remote_model import RemoteModel
from tinkex.errors import APIResponseValidationError
from tinkex.ids import check_name, check_ttl, parse_tinker_path
from tinkex.wire.endpoints import (
    LOAD_WEIGHTS,
    SAVE_WEIGHTS,
    SAVE_WEIGHTS_EXTERNAL,
    SAVE_WEIGHTS_FOR_SAMPLER,
)


@deprecate_async_names
class CheckpointMethods:
    """The methods of TrainingClient that save and load checkpoints."""

    def __init__(self, holder: Holder, model_seq_id: int, model_id: types.ModelID) -> None:
        self.holder = holder
        self.model_id = model_id
        self.model_seq_id = model_seq_id
        self._model = RemoteModel(holder, model_id)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save weights and optimizer state, to resume training later."""
        _check_save_arguments(name, ttl_seconds)
        return self._model.submit_request(
            SAVE_WEIGHTS,
            lambda seq_id: types.SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            ),
        )

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Async version of save_state(): await it, then await its future."""
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Load saved weights and reset the optimizer. Deprecated."""
        warn_moved("TrainingClient.load_state()", "create_training_client_from_state()")
        return self.load(path, weights_access_token, optimizer=False)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Async version of load_state(): await it, then await its future."""
        return self.load_state(path, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Load saved weights and optimizer state. Deprecated."""
        new = "create_training_client_from_state_with_optimizer()"
        warn_moved("TrainingClient.load_state_with_optimizer()", new)
        return self.load(path, weights_access_token, optimizer=True)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Async version of load_state_with_optimizer(): await it, then await its future."""
        return self.load_state_with_optimizer(path, weights_access_token)

    def load(
        self, path: str, weights_access_token: str | None, *, optimizer: bool
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Load a checkpoint into this adapter, with or without its optimizer state."""
        parse_tinker_path(path)
        return self._model.submit_request(
            LOAD_WEIGHTS,
            lambda seq_id: types.LoadWeightsRequest(
                model_id=self.model_id,
                path=path,
                seq_id=seq_id,
                optimizer=optimizer,
                weights_access_token=weights_access_token,
            ),
        )

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save weights under a name for sampling."""
        _check_save_arguments(name, ttl_seconds)
        saved = self._model.submit_request(
            SAVE_WEIGHTS_FOR_SAMPLER,
            lambda seq_id: types.SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                user_metadata=user_metadata,
            ),
        )
        return map_future(saved, _sampler_response)

    async def save_weights_for_sampler_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Async version of save_weights_for_sampler(): await it, then await its future."""
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        """Save weights as downloadable files."""
        _check_save_arguments(name, ttl_seconds)
        saved = self._model.submit_request(
            SAVE_WEIGHTS_EXTERNAL,
            lambda seq_id: types.SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=age_encryption_recipients,
            ),
        )
        return map_future(saved, _require_external_path)

    async def save_weights_external_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        """Async version of save_weights_external(): await it, then await its future."""
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)


def _check_save_arguments(name: str, ttl_seconds: int | None) -> None:
    check_name(name)
    check_ttl(ttl_seconds)


def _sampler_response(
    reply: types.SaveWeightsForSamplerResponseInternal,
) -> types.SaveWeightsForSamplerResponse:
    if reply.path is None:
        raise APIResponseValidationError(None, None, "save_weights_for_sampler returned no path")
    return types.SaveWeightsForSamplerResponse(path=reply.path)


def _require_external_path(
    reply: types.SaveWeightsExternalResponseInternal,
) -> types.SaveWeightsExternalResponse:
    if reply.path is None:
        raise APIResponseValidationError(None, None, "The server returned no checkpoint path")
    return types.SaveWeightsExternalResponse(path=reply.path)
