"""The training client: trains one adapter on the server; calls are sent in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tinkex import types
from tinkex.client.compat import deprecate_async_names, warn_loss_type_input, warn_unused_name
from tinkex.client.custom_loss import (
    CustomLossFnV1,
    LossHandle,
    check_loss_fn,
    check_loss_inputs,
    check_loss_session,
)
from tinkex.client.future import APIFuture, map_future
from tinkex.client.metrics import Metrics
from tinkex.client.retry import RetryConfig
from tinkex.client.sampling import SamplingClient
from tinkex.client.telemetry import Telemetry
from tinkex.client.tokenizers import load_model_tokenizer
from tinkex.client.training_checkpoints import CheckpointMethods
from tinkex.client.value_future import wait_or_return
from tinkex.errors import APIResponseValidationError, InvalidInput
from tinkex.wire.endpoints import GET_INFO, OPTIM_STEP, SAVE_WEIGHTS_FOR_SAMPLER

ForwardBackwardOutput = types.ForwardBackwardOutput


@deprecate_async_names
class TrainingClient(CheckpointMethods):
    """Trains one adapter. Created by ServiceClient.create_lora_training_client() and similar.

    Operations return a future immediately. They reach the server in call order, whether or not
    their futures are awaited.
    """

    # --- forward and backward -------------------------------------------------------------

    def forward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and its outputs, without a gradient."""
        return self._model.submit_pass(data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Async version of forward(): await it, then await its future."""
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and accumulate its gradient for the next optim_step()."""
        return self._model.submit_pass(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Async version of forward_backward(): await it, then await its future."""
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: CustomLossFnV1 | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Train with a custom loss over log-probabilities, computed locally with torch.

        The loss runs on a dedicated thread; later calls of this client wait until it is sent.
        """
        warn_loss_type_input(loss_type_input)
        check_loss_fn(loss_fn)
        if isinstance(loss_fn, LossHandle):
            check_loss_session(loss_fn, self.holder.known_session_id)
            check_loss_inputs(loss_fn, data)
            if loss_fn.loss_id is not None:
                config = {"loss_id": loss_fn.loss_id}
                return self._model.submit_pass(data, "custom", config, forward_only=False)
        return self._model.submit_custom_loss(data, loss_fn)

    async def forward_backward_custom_async(
        self,
        data: list[types.Datum],
        loss_fn: CustomLossFnV1 | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Async version of forward_backward_custom(): await it, then await its future."""
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    def optim_step(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """Apply the accumulated gradient and clear it."""
        if optim_params is not None and adam_params is not None:
            raise InvalidInput("Pass either optim_params or its old name adam_params, not both")
        params = optim_params if optim_params is not None else adam_params
        if params is None:
            raise InvalidInput("optim_step needs optim_params, e.g. AdamParams(learning_rate=1e-4)")
        return self._model.submit_request(
            OPTIM_STEP,
            lambda seq_id: types.OptimStepRequest(
                model_id=self.model_id, seq_id=seq_id, optim_params=params
            ),
        )

    async def optim_step_async(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """Async version of optim_step(): await it, then await its future."""
        return self.optim_step(optim_params, adam_params=adam_params)

    # --- sampling -------------------------------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Return a client that samples from saved weights."""
        created = SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )
        return wait_or_return(created, SamplingClient)

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Async version of create_sampling_client()."""
        return await SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Snapshot the current weights and return a client that samples from the snapshot."""
        warn_unused_name(name)
        created = self._save_for_sampling(retry_config, record_stability_info)
        return wait_or_return(created, SamplingClient)

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Async version of save_weights_and_get_sampling_client(); never blocks the event loop."""
        warn_unused_name(name)
        return await self._save_for_sampling(retry_config, record_stability_info)

    def _save_for_sampling(
        self, retry_config: RetryConfig | None, record_stability_info: bool
    ) -> APIFuture[SamplingClient]:
        # Reserved once, here: a retry must not create a second sampling session.
        sampling_seq_id = self.holder.next_sampling_seq_id()
        saved = self._model.submit_request(
            SAVE_WEIGHTS_FOR_SAMPLER,
            lambda seq_id: types.SaveWeightsForSamplerRequest(
                model_id=self.model_id, seq_id=seq_id, sampling_session_seq_id=sampling_seq_id
            ),
        )
        return map_future(
            saved,
            lambda reply: SamplingClient(
                self.holder,
                sampling_session_id=_sampling_session_id(reply),
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            ),
        )

    # --- about this client ----------------------------------------------------------------

    def get_info(self) -> APIFuture[types.GetInfoResponse]:
        """Return the server's description of this model."""
        return wait_or_return(self.holder.start(self._info()), types.GetInfoResponse)

    async def get_info_async(self) -> types.GetInfoResponse:
        """Async version of get_info()."""
        return await self.holder.start(self._info())

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the base model."""
        data = self.holder.run(self._info()).model_data
        if data.model_name is None:
            raise APIResponseValidationError(None, None, "get_info returned no base model name")
        return load_model_tokenizer(self.holder, data.model_name, data.tokenizer_id)

    def get_console_url(self) -> str:
        """Return the web page of this run."""
        return self.holder.console_url("training_runs", self.model_id)

    def get_telemetry(self) -> Telemetry | None:
        """Return the telemetry reporter of this session; None unless telemetry is enabled."""
        return self.holder.telemetry

    def metrics(self) -> Metrics:
        """Return counters and latency percentiles of this client's session."""
        return self.holder.metrics()

    async def _info(self) -> types.GetInfoResponse:
        message = types.GetInfoRequest(model_id=self.model_id)
        return await self.holder.transport.call(GET_INFO, message)


def _sampling_session_id(reply: types.SaveWeightsForSamplerResponseInternal) -> str:
    if reply.sampling_session_id is None:
        raise APIResponseValidationError(
            None, None, "save_weights_for_sampler returned no sampling session"
        )
    return reply.sampling_session_id
