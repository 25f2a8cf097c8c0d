"""Messages about models: capabilities, creation, information, saving and loading."""

from __future__ import annotations

from typing import Any, Literal

from tinkex.ids import parse_tinker_path
from tinkex.types.base import Message, Reply
from tinkex.types.checkpoints import checkpoint_console_url, playground_url
from tinkex.types.optimizers import AdamOptimizerConfig, AnyOptimizerConfig
from tinkex.types.training import LoraConfig, ModelID


class SupportedModel(Reply):
    """A base model of the server."""

    model_name: str | None = None
    """Its name."""
    max_context_length: int | None = None
    """Maximum number of prompt and sampled tokens."""
    trainable: bool | None = None
    """Whether it can be trained."""
    sampleable: bool | None = None
    """Whether it can be sampled."""


class GetServerCapabilitiesResponse(Reply):
    """The capabilities of the server."""

    supported_models: list[SupportedModel]
    """Its base models."""


class HealthResponse(Reply):
    """The server is healthy."""

    status: Literal["ok"]


class CreateModelRequest(Message):
    """Request a new model for training."""

    session_id: str
    model_seq_id: int
    """The sequence number of the model within its session."""
    base_model: str
    """The model to start from."""
    user_metadata: dict[str, Any] | None = None
    """Stored with the run."""
    lora_config: LoraConfig | None = None
    """The adapter to train."""
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig()
    """The optimizer; it cannot be changed later."""
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Reply):
    """The new model's id."""

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Message):
    """Request information about a model."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Reply):
    """Architecture, name and tokenizer of the base model."""

    arch: str | None = None
    """The architecture."""
    model_name: str | None = None
    """The base model's name."""
    tokenizer_id: str | None = None
    """The tokenizer's name."""


class GetInfoResponse(Reply):
    """Information about a model."""

    type: Literal["get_info"] | None = None
    model_data: ModelData
    """Architecture, name and tokenizer of the base model."""
    model_id: ModelID
    """Its id."""
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig()
    """Its optimizer."""
    is_lora: bool | None = None
    """Whether an adapter is trained."""
    lora_rank: int | None = None
    """The adapter's rank."""
    model_name: str | None = None
    """Its name."""


class UnloadModelRequest(Message):
    """Request to drop a model's state."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Reply):
    """The model was unloaded."""

    model_id: ModelID
    type: Literal["unload_model"] | None = None


class SaveWeightsRequest(Message):
    """Request a training checkpoint."""

    model_id: ModelID
    path: str | None = None
    """The checkpoint's name."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    """Its lifetime; None means unlimited."""
    overwrite: bool = False
    """Replace a checkpoint of the same name."""
    user_metadata: dict[str, str] | None = None
    """Stored with the checkpoint."""
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Reply):
    """The path of the training checkpoint."""

    path: str
    """Its tinker:// path."""
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """Return the checkpoint's page in the hosted console."""
        return _console_url(self.path)


class SaveWeightsForSamplerRequest(Message):
    """Request weights for sampling: named, or unnamed for one sampling session."""

    model_id: ModelID
    path: str | None = None
    """The checkpoint's name, or None for weights of a new sampling session."""
    sampling_session_seq_id: int | None = None
    """The sequence number of the new sampling session."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    """Its lifetime; None means unlimited."""
    user_metadata: dict[str, str] | None = None
    """Stored with the checkpoint."""
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(Reply):
    """The raw response: a path for named weights, a sampling session for unnamed ones."""

    path: str | None = None
    """The path of named weights."""
    sampling_session_id: str | None = None
    """The sampling session of unnamed weights."""
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(Reply):
    """The path of the sampler checkpoint."""

    path: str
    """Its tinker:// path."""
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """Return the checkpoint's page in the hosted console."""
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """Return the checkpoint's playground page in the hosted console."""
        return playground_url(self.path)


class SaveWeightsExternalRequest(Message):
    """Request a checkpoint in a format for other tools."""

    model_id: ModelID
    path: str
    """The checkpoint's name."""
    seq_id: int | None = None
    ttl_seconds: int | None = None
    """Its lifetime; None means unlimited."""
    age_encryption_recipients: list[str] | None = None
    """Encrypt every file to these age or SSH public keys."""
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Reply):
    """The raw response about an exported checkpoint."""

    path: str | None = None
    """Its tinker:// path."""
    size_bytes: int | None = None
    """Its size."""
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(Reply):
    """The path of the exported checkpoint."""

    path: str
    """Its tinker:// path."""
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Message):
    """Request to load a checkpoint into a model, or to create a model from it."""

    model_id: ModelID | None = None
    """An existing model; requires `seq_id`."""
    seq_id: int | None = None
    session_id: str | None = None
    """The session of the model to create; requires `model_seq_id`."""
    model_seq_id: int | None = None
    base_model: str | None = None
    """Another, compatible base model for the new model."""
    user_metadata: dict[str, Any] | None = None
    """Stored with the run."""
    path: str
    """The checkpoint's tinker:// path."""
    optimizer: bool = True
    """Whether to load the optimizer state; SDKs before 0.6 always do and omit this field."""
    optimizer_config: AnyOptimizerConfig | None = None
    """The optimizer of a new model that loads weights only."""
    weights_access_token: str | None = None
    """A credential for the checkpoint, if another account owns it."""
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Reply):
    """The weights are loaded."""

    path: str | None = None
    """The checkpoint's tinker:// path."""
    model_id: str | None = None
    """The model."""
    type: Literal["load_weights"] | None = None


def _console_url(tinker_path: str) -> str:
    path = parse_tinker_path(tinker_path)
    return checkpoint_console_url(path.run_id, path.checkpoint_id)
