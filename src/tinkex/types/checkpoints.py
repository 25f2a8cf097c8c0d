"""Checkpoints and training runs, as the REST endpoints list them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self, TypeAlias, cast
from urllib.parse import quote

from tinkex.ids import parse_tinker_path
from tinkex.settings import HOSTED_CONSOLE_URL
from tinkex.types.base import Message, Reply
from tinkex.types.optimizers import AdamOptimizerConfig, AnyOptimizerConfig

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]


class Cursor(Reply):
    """Which part of a list this is."""

    offset: int
    """How many items were skipped."""
    limit: int
    """The most items that were asked for."""
    total_count: int
    """How many items there are in all."""


class Checkpoint(Reply):
    """A saved state of a model."""

    checkpoint_id: str
    """The id within its run, such as weights/0001."""
    checkpoint_type: CheckpointType
    """What it can be used for."""
    time: datetime
    """When it was made."""
    tinker_path: str
    """Its address."""
    size_bytes: int | None = None
    """How large it is."""
    public: bool = False
    """Whether everybody may read it."""
    user_metadata: dict[str, str] | None = None
    """What its owner attached to it."""
    expires_at: datetime | None = None
    """When it will be deleted; None is never."""


class ParsedCheckpointTinkerPath(Reply):
    """A checkpoint's address, taken apart."""

    tinker_path: str
    """The whole address."""
    training_run_id: str
    """The run it belongs to."""
    checkpoint_type: CheckpointType
    """What it can be used for."""
    checkpoint_id: str
    """The id within its run, such as weights/0001."""

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Take an address apart, or say what is wrong with it."""
        path = parse_tinker_path(tinker_path)
        return cls(
            tinker_path=tinker_path,
            training_run_id=path.run_id,
            checkpoint_type=cast("CheckpointType", path.checkpoint_type),
            checkpoint_id=path.checkpoint_id,
        )


class CheckpointsListResponse(Reply):
    """A list of checkpoints."""

    checkpoints: list[Checkpoint]
    """The checkpoints."""
    cursor: Cursor | None = None
    """Which part of the list this is; None if it is all."""


class TrainingRun(Reply):
    """A model that was, or is being, trained."""

    training_run_id: str
    """Its id, also called model id."""
    base_model: str
    """The model it started from."""
    model_owner: str
    """Who made it."""
    is_lora: bool
    """Whether an adapter is trained instead of the whole model."""
    corrupted: bool = False
    """Whether its state was lost."""
    lora_rank: int | None = None
    """The adapter's rank."""
    last_request_time: datetime
    """When it was last used."""
    last_checkpoint: Checkpoint | None = None
    """Its newest training checkpoint."""
    last_sampler_checkpoint: Checkpoint | None = None
    """Its newest sampler checkpoint."""
    user_metadata: dict[str, str] | None = None
    """What its owner attached to it."""
    name: str | None = None
    """Its name; only tinkex servers report it and the fields below."""
    state: str | None = None
    """training, waiting, idle, finished, interrupted or failed."""
    step: int | None = None
    """How many optimizer steps it has done."""
    metrics: dict[str, float] | None = None
    """The metrics of its newest optimizer step."""
    created_at: datetime | None = None
    """When it was created."""


class TrainingRunsResponse(Reply):
    """A page of training runs."""

    training_runs: list[TrainingRun]
    """The runs."""
    cursor: Cursor
    """Which part of the list this is."""


class WeightsInfoResponse(Reply):
    """What one must know to load a checkpoint."""

    base_model: str
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class ExternalWeightsUrlsResponse(Reply):
    """Where an exported checkpoint's files can be fetched."""

    urls: dict[str, str]
    """A signed URL per file, by the file's path within the checkpoint."""
    expires: datetime
    """Until when the URLs work."""


class CopyWeightsRequest(Message):
    """Ask for a copy of a checkpoint, owned by a project or by a session's next model."""

    session_id: str | None = None
    """The session that will own the copy; goes with `model_seq_id`."""
    model_seq_id: int | None = None
    """The copy's place among the session's models."""
    destination_project_id: str | None = None
    """The project that will own the copy, if no session does."""
    source_path: str
    """The tinker:// path to copy."""
    ttl_seconds: int | None = None
    """How long the copy lives; None is for ever."""
    weights_access_token: str | None = None
    """A credential for the source, if another account owns it."""


class CopyWeightsResponse(Reply):
    """Where the copy is."""

    tinker_path: str
    """The copy's address."""


def checkpoint_console_url(training_run_id: str, checkpoint_id: str) -> str:
    """The page of a checkpoint."""
    run, checkpoint = quote(training_run_id, safe=""), quote(checkpoint_id, safe="")
    return f"{HOSTED_CONSOLE_URL}/checkpoints/{run}/{checkpoint}"


def playground_url(tinker_path: str) -> str:
    """The page to talk to a checkpoint."""
    return (
        f"{HOSTED_CONSOLE_URL}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"
    )
