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
    """The position of a page in a list."""

    offset: int
    """Number of skipped items."""
    limit: int
    """Maximum number of items in the page."""
    total_count: int
    """Total number of items."""


class Checkpoint(Reply):
    """A saved state of a model."""

    checkpoint_id: str
    """The id within its run, such as weights/0001."""
    checkpoint_type: CheckpointType
    """Its kind."""
    time: datetime
    """When it was saved."""
    tinker_path: str
    """Its tinker:// path."""
    size_bytes: int | None = None
    """Its size."""
    public: bool = False
    """Whether all users may read it."""
    user_metadata: dict[str, str] | None = None
    """Metadata set by its owner."""
    expires_at: datetime | None = None
    """When it expires; None means never."""
    base_model: str | None = None
    """The model that its run trains; since SDK 0.39."""


class ParsedCheckpointTinkerPath(Reply):
    """The parts of a checkpoint's path."""

    tinker_path: str
    """The whole path."""
    training_run_id: str
    """The run it belongs to."""
    checkpoint_type: CheckpointType
    """Its kind."""
    checkpoint_id: str
    """The id within its run, such as weights/0001."""

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Parse a tinker:// path; raises InvalidInput if it is invalid."""
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
    """The position of this page; None if the list is complete."""


class TrainingRun(Reply):
    """A training run."""

    training_run_id: str
    """Its id, also called model id."""
    base_model: str
    """The model it started from."""
    model_owner: str
    """Its owner."""
    is_lora: bool
    """Whether a LoRA adapter is trained."""
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
    """Metadata set by its owner."""
    name: str | None = None
    """Its name; only tinkex servers report it and the fields below."""
    state: str | None = None
    """training, waiting, idle, finished, interrupted or failed."""
    step: int | None = None
    """Number of completed optimizer steps."""
    metrics: dict[str, float] | None = None
    """The metrics of its newest optimizer step."""
    created_at: datetime | None = None
    """When it was created."""


class TrainingRunsResponse(Reply):
    """A page of training runs."""

    training_runs: list[TrainingRun]
    """The runs."""
    cursor: Cursor
    """The position of this page."""


class WeightsInfoResponse(Reply):
    """Information needed to load a checkpoint."""

    base_model: str
    optimizer_config: AnyOptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    alpha: float | None = None
    """LoRA alpha; tinkex servers report it unless it is 32."""
    use_rslora: bool | None = None
    """Whether the scale is alpha / sqrt(rank); reported only if it is."""
    target_modules: list[str] | None = None
    """The names that selected the adapted modules; left out for all modules."""


class ExternalWeightsUrlsResponse(Reply):
    """The URLs of an exported checkpoint's files."""

    urls: dict[str, str]
    """A signed URL per file, by the file's path within the checkpoint."""
    expires: datetime
    """When the URLs expire."""


class CopyWeightsRequest(Message):
    """Request a copy of a checkpoint, owned by a project or by a session's next model."""

    session_id: str | None = None
    """The session that will own the copy; requires `model_seq_id`."""
    model_seq_id: int | None = None
    """The sequence number of the copy among the session's models."""
    destination_project_id: str | None = None
    """The project that will own the copy, without a session."""
    source_path: str
    """The tinker:// path to copy."""
    ttl_seconds: int | None = None
    """Lifetime of the copy; None means unlimited."""
    weights_access_token: str | None = None
    """A credential for the source, if another account owns it."""


class CopyWeightsResponse(Reply):
    """The path of the copy."""

    tinker_path: str
    """The tinker:// path of the copy."""


def checkpoint_console_url(training_run_id: str, checkpoint_id: str) -> str:
    """Return the console page of a checkpoint."""
    run, checkpoint = quote(training_run_id, safe=""), quote(checkpoint_id, safe="")
    return f"{HOSTED_CONSOLE_URL}/checkpoints/{run}/{checkpoint}"


def playground_url(tinker_path: str) -> str:
    """Return the playground page of a checkpoint."""
    return (
        f"{HOSTED_CONSOLE_URL}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"
    )
