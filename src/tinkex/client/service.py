"""The service client: the entry point that creates all other clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from tinkex import types
from tinkex.client.compat import deprecate_async_names, warn_moved
from tinkex.client.config import Config
from tinkex.client.custom_loss import LossHandle, PerDatumLossFn, trace_loss
from tinkex.client.future import APIFuture
from tinkex.client.holder import FinishStatus, Holder, SessionPlan
from tinkex.client.http import HttpTransport
from tinkex.client.metrics import Metrics
from tinkex.client.model_creation import create_model, create_model_from_checkpoint, upload_loss
from tinkex.client.rest import RestClient
from tinkex.client.retry import RetryConfig
from tinkex.client.sampling import SamplingClient
from tinkex.client.telemetry import Telemetry
from tinkex.client.training import TrainingClient
from tinkex.client.value_future import wait_or_return
from tinkex.errors import ClientClosed, InvalidInput
from tinkex.wire.endpoints import CAPABILITIES, HEALTH

FINISH_STATUSES = ("success", "errored", "interrupted")


class LoraOptions(TypedDict, total=False):
    """Further fields of `LoraConfig`; None means unset."""

    alpha: float | None
    use_rslora: bool | None
    target_modules: list[str] | None
    dropout: float | None


@deprecate_async_names
class ServiceClient:
    """The entry point: creates training, sampling and REST clients that share one session.

    Sends nothing until the first call that needs the server. Use it as a context manager, or call
    close(), so that the session ends with your work.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: Config | None = None,
        transport: HttpTransport | None = None,
        **kwargs: Any,
    ) -> None:
        if config is None:
            config = Config.new(base_url=base_url, api_key=api_key, **kwargs)
        elif base_url is not None or api_key is not None or kwargs:
            raise InvalidInput("Pass either a config or single settings, not both")
        extra_headers = dict(default_headers_overrides or {})
        changes: dict[str, object] = {"headers": {**config.headers, **extra_headers}}
        if project_id is not None:
            changes["project_id"] = project_id
        if user_metadata is not None:
            changes["user_metadata"] = user_metadata
        config = config.evolve(**changes)
        plan = SessionPlan(dict(config.user_metadata or {}), display_name)
        self._holder = Holder(config, plan, transport)
        self.config = self._holder.config

    # --- lifecycle ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._holder.is_closed:
            raise ClientClosed("ServiceClient is closed")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_finish_status(exc_type), _exception_name(exc_value)).result()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(_finish_status(exc_type), _exception_name(exc_value))

    def close(self, status: FinishStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Stop heartbeats and report to the server how the session ended."""
        if status not in FINISH_STATUSES:
            allowed = ", ".join(FINISH_STATUSES)
            raise InvalidInput(f"status must be one of {allowed}, got {status!r}")
        return self._holder.close(status, detail)

    # --- about the server -----------------------------------------------------------------

    def get_server_capabilities(self) -> APIFuture[types.GetServerCapabilitiesResponse]:
        """Return the models that the server offers."""
        return wait_or_return(
            self._holder.start(self._capabilities()), types.GetServerCapabilitiesResponse
        )

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        """Async version of get_server_capabilities()."""
        return await self._holder.start(self._capabilities())

    def health(self) -> APIFuture[types.HealthResponse]:
        """Return the server's health status."""
        return wait_or_return(
            self._holder.start(self._holder.transport.call(HEALTH)), types.HealthResponse
        )

    # --- training clients -----------------------------------------------------------------

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | None = None,
        **options: Unpack[LoraOptions],
    ) -> APIFuture[TrainingClient]:
        """Create a new LoRA adapter on a base model and return a client that trains it.

        The further options are those of tinkex servers: `alpha`, `use_rslora`, `target_modules` and
        `dropout`, see `LoraConfig`. They are sent only if they are given.
        """
        lora = _lora_config(rank, seed, train_mlp, train_attn, train_unembed, options)
        created = self._create_model(base_model, lora, user_metadata, optimizer)
        return wait_or_return(created, TrainingClient)

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | None = None,
        **options: Unpack[LoraOptions],
    ) -> TrainingClient:
        """Async version of create_lora_training_client()."""
        lora = _lora_config(rank, seed, train_mlp, train_attn, train_unembed, options)
        return await self._create_model(base_model, lora, user_metadata, optimizer)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a training client from saved weights, with a new optimizer."""
        created = self._load_model(path, base_model, user_metadata, weights_access_token, optimizer)
        return wait_or_return(created, TrainingClient)

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Async version of create_training_client_from_state()."""
        return await self._load_model(
            path, base_model, user_metadata, weights_access_token, optimizer
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a training client from saved weights and optimizer state, to resume exactly."""
        created = self._load_model(
            path, base_model, user_metadata, weights_access_token, with_optimizer=True
        )
        return wait_or_return(created, TrainingClient)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Async version of create_training_client_from_state_with_optimizer()."""
        return await self._load_model(
            path, base_model, user_metadata, weights_access_token, with_optimizer=True
        )

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, types.CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a per-datum loss; it runs on the server if supported, else in this process."""
        return self._holder.start(upload_loss(self._holder, trace_loss(fn, input_ranks)))

    # --- sampling and REST clients --------------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Create a client that samples from a base model or from saved weights."""
        created = self._sampling_client(model_path, base_model, retry_config, record_stability_info)
        return wait_or_return(created, SamplingClient)

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Async version of create_sampling_client()."""
        return await self._sampling_client(
            model_path, base_model, retry_config, record_stability_info
        )

    def rest_client(self) -> RestClient:
        """Return a REST client that shares this client's connections."""
        return RestClient(self._holder)

    def create_rest_client(self) -> RestClient:
        """Old name of rest_client(); RestClient() works without a service client too."""
        warn_moved("ServiceClient.create_rest_client()", "RestClient()")
        return self.rest_client()

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project; resolves to the path of the copy."""
        return self.rest_client().copy_weights(
            path,
            self.config.project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    # --- about this client ----------------------------------------------------------------

    @property
    def holder(self) -> Holder:
        """Deprecated: internal state, subject to change."""
        warn_moved("ServiceClient.holder", "the public methods: it is internal")
        return self._holder

    def get_console_url(self) -> str:
        """Return the web page of this session, or of all sessions if it is not open yet."""
        return self._holder.console_url("sessions", self._holder.known_session_id)

    def get_telemetry(self) -> Telemetry | None:
        """Return the telemetry reporter of this session; None unless telemetry is enabled."""
        return self._holder.telemetry

    def metrics(self) -> Metrics:
        """Return counters and latency percentiles of this client's session."""
        return self._holder.metrics()

    async def _capabilities(self) -> types.GetServerCapabilitiesResponse:
        await self._holder.ready()
        return await self._holder.transport.call(CAPABILITIES)

    def _create_model(
        self,
        base_model: str,
        lora: types.LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: types.OptimizerConfig | None,
    ) -> APIFuture[TrainingClient]:
        if not isinstance(base_model, str) or not base_model.strip():
            raise InvalidInput(f"base_model must be the name of a model, got {base_model!r}")
        return self._holder.start(
            create_model(self._holder, str(base_model), lora, user_metadata, optimizer)
        )

    def _load_model(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        weights_access_token: str | None,
        optimizer: types.OptimizerConfig | None = None,
        *,
        with_optimizer: bool = False,
    ) -> APIFuture[TrainingClient]:
        return self._holder.start(
            create_model_from_checkpoint(
                self._holder,
                path,
                base_model=base_model,
                user_metadata=user_metadata,
                weights_access_token=weights_access_token,
                optimizer_config=optimizer,
                with_optimizer=with_optimizer,
            )
        )

    def _sampling_client(
        self,
        model_path: str | None,
        base_model: str | None,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
    ) -> APIFuture[SamplingClient]:
        return SamplingClient.create(
            self._holder,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )


def _lora_config(
    rank: int,
    seed: int | None,
    train_mlp: bool,
    train_attn: bool,
    train_unembed: bool,
    options: LoraOptions,
) -> types.LoraConfig:
    return types.LoraConfig(
        rank=rank,
        seed=seed,
        train_mlp=train_mlp,
        train_attn=train_attn,
        train_unembed=train_unembed,
        **options,
    )


def _finish_status(exc_type: type[BaseException] | None) -> FinishStatus:
    if exc_type is None:
        return "success"
    return "errored" if issubclass(exc_type, Exception) else "interrupted"


def _exception_name(error: BaseException | None) -> str | None:
    # Only the type: the message may contain private data.
    return type(error).__name__ if error is not None else None
