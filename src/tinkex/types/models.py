"""Models on the server: what it offers, making one, asking about one, saving and loading."""

from __future__ import annotations

from typing import Any, Literal

from tinkex.ids import parse_tinker_path
from tinkex.types.base import Message, Reply
from tinkex.types.checkpoints import checkpoint_console_url, playground_url
from tinkex.types.optimizers import AdamOptimizerConfig, AnyOptimizerConfig
from tinkex.types.training import LoraConfig, ModelID


class SupportedModel(Reply):
    """A base model that the server offers."""

    model_name: str | None = None
    """Its name."""
    max_context_length: int | None = None
    """The most tokens it can read and write together."""
    trainable: bool | None = None
    """Whether it can be trained."""
    sampleable: bool | None = None
    """Whether it can be sampled."""


class GetServerCapabilitiesResponse(Reply):
    """What the server offers."""

    supported_models: list[SupportedModel]
    """Its base models."""


class HealthResponse(Reply):
    """The server is there."""

    status: Literal["ok"]


class CreateModelRequest(Message):
    """Ask for a model to train."""

    session_id: str
    model_seq_id: int
    """The model's place among the session's models."""
    base_model: str
    """The model to start from."""
    user_metadata: dict[str, Any] | None = None
    """Kept with the run."""
    lora_config: LoraConfig | None = None
    """The adapter to train."""
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig()
    """The optimizer, for the model's whole life."""
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Reply):
    """The new model's id."""

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Message):
    """Ask about a model."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Reply):
    """What kind of model it is."""

    arch: str | None = None
    """The architecture."""
    model_name: str | None = None
    """The base model's name."""
    tokenizer_id: str | None = None
    """The tokenizer's name."""


class GetInfoResponse(Reply):
    """What the server knows about a model."""

    type: Literal["get_info"] | None = None
    model_data: ModelData
    """What kind of model it is."""
    model_id: ModelID
    """Its id."""
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig()
    """How it is trained."""
    is_lora: bool | None = None
    """Whether an adapter is trained."""
    lora_rank: int | None = None
    """The adapter's rank."""
    model_name: str | None = None
    """Its name."""


class UnloadModelRequest(Message):
    """Ask the server to forget a model's live state."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Reply):
    """The model is gone."""

    model_id: ModelID
    type: Literal["unload_model"] | None = None


class SaveWeightsRequest(Message):
    """Ask for a training checkpoint."""

    model_id: ModelID
    path: str | None = None
    """The checkpoint's name."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    """How long it lives; None is for ever."""
    overwrite: bool = False
    """Replace a checkpoint of the same name."""
    user_metadata: dict[str, str] | None = None
    """Kept with the checkpoint."""
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Reply):
    """Where the training checkpoint is."""

    path: str
    """Its address."""
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted console."""
        return _console_url(self.path)


class SaveWeightsForSamplerRequest(Message):
    """Ask for weights to sample from: named, or for one sampling session."""

    model_id: ModelID
    path: str | None = None
    """The checkpoint's name, or None for weights that only a new sampling session uses."""
    sampling_session_seq_id: int | None = None
    """The new sampling session's place among the session's."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    """How long it lives; None is for ever."""
    user_metadata: dict[str, str] | None = None
    """Kept with the checkpoint."""
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(Reply):
    """The raw answer: a path for named weights, a sampling session for unnamed ones."""

    path: str | None = None
    """The address of named weights."""
    sampling_session_id: str | None = None
    """The sampling session of unnamed weights."""
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(Reply):
    """Where the sampler checkpoint is."""

    path: str
    """Its address."""
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """The checkpoint's page in the hosted console."""
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """The page of the hosted console to talk to the checkpoint."""
        return playground_url(self.path)


class SaveWeightsExternalRequest(Message):
    """Ask for a checkpoint in a format that other tools read."""

    model_id: ModelID
    path: str
    """The checkpoint's name."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    """How long it lives; None is for ever."""
    age_encryption_recipients: list[str] | None = None
    """Encrypt every file to these age or SSH public keys."""
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Reply):
    """The raw answer about an exported checkpoint."""

    path: str | None = None
    """Its address."""
    size_bytes: int | None = None
    """How large it is."""
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(Reply):
    """Where the exported checkpoint is."""

    path: str
    """Its address."""
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Message):
    """Ask to load a checkpoint into a model, or to make a model from it."""

    model_id: ModelID | None = None
    """An existing model; goes with `seq_id`."""
    seq_id: int | None = None
    session_id: str | None = None
    """The session of a model that this request makes; goes with `model_seq_id`."""
    model_seq_id: int | None = None
    base_model: str | None = None
    """Another, compatible base model for the new model."""
    user_metadata: dict[str, Any] | None = None
    """Kept with the run."""
    path: str
    """The checkpoint's address."""
    optimizer: bool = True
    """Whether to load the optimizer's state too; SDKs before 0.6 always do and do not say so."""
    optimizer_config: AnyOptimizerConfig | None = None
    """The optimizer of a new model that loads weights only."""
    weights_access_token: str | None = None
    """A credential for the checkpoint, if another account owns it."""
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Reply):
    """The weights are loaded."""

    path: str | None = None
    """The checkpoint's address."""
    model_id: str | None = None
    """The model that has them now."""
    type: Literal["load_weights"] | None = None


def _console_url(tinker_path: str) -> str:
    path = parse_tinker_path(tinker_path)
    return checkpoint_console_url(path.run_id, path.checkpoint_id)
