"""Queries of the pages about models: which are served, who uses them, which can be chatted with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinkex.engine.models.model_folder import DTYPE_BYTES, read_model_folder
from tinkex.engine.models.sources import BaseModelList, is_folder_location
from tinkex.engine.protocol import BaseModel
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.server.config import ServerConfig
from tinkex.server.dashboard.account_pages import TOKEN_KINDS
from tinkex.server.dashboard.administration import is_operator
from tinkex.server.dashboard.model_additions import (
    Addition,
    Candidate,
    can_add,
    list_candidates,
    read_addition,
)
from tinkex.server.http.model_specs import list_served_models
from tinkex.server.http.run_summaries import summarize_runs
from tinkex.settings import expand_path
from tinkex.store import checkpoints, runs, usage_sums
from tinkex.store.database import Connection
from tinkex.store.records import CheckpointRecord, TenantRecord
from tinkex.store.usage_sums import ModelUser

#: Rows of the table of users.
MAX_USERS = 100
#: Checkpoints that the playground offers; others are entered by their path.
MAX_CHECKPOINTS = 200
WEEK_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A served base model."""

    model: BaseModel
    weight_bytes: int | None
    """Memory of the loaded weights; None if the API process does not know the files."""
    num_parameters: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPage:
    """The data of the page of base models."""

    is_operator: bool
    rows: Sequence[ModelRow]
    users: Sequence[ModelUser]
    """For the operator only."""
    candidates: Sequence[Candidate]
    """For the operator only."""
    can_add: bool
    addition: Addition | None
    is_adding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
    """A checkpoint to sample from."""

    checkpoint: CheckpointRecord
    run_name: str

    @property
    def label(self) -> str:
        """The run's name or id, the checkpoint's name and the base model."""
        run = self.run_name or self.checkpoint.run_id
        kind = (
            "" if self.checkpoint.segment == "sampler_weights" else f" ({self.checkpoint.segment})"
        )
        return f"{run} / {self.checkpoint.name}{kind} · {self.checkpoint.base_model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundPage:
    """The data of the playground."""

    base_models: Sequence[BaseModel]
    checkpoints: Sequence[CheckpointChoice]


def read_models(
    db: Connection, tenant: TenantRecord, config: ServerConfig, now: float
) -> ModelsPage:
    """Read the served base models; who uses them and which can be added only for the operator."""
    served = list_served_models(db)
    sizes = _read_sizes(config)
    addition = read_addition(db) if is_operator(tenant) else None
    return ModelsPage(
        is_operator=is_operator(tenant),
        rows=[_row(model, sizes) for model in sorted(served, key=lambda model: model.name)],
        users=(
            usage_sums.list_model_users(db, TOKEN_KINDS, now - WEEK_SECONDS, MAX_USERS)
            if is_operator(tenant)
            else ()
        ),
        candidates=(
            list_candidates(config, [model.name for model in served])
            if is_operator(tenant) and can_add(config)
            else ()
        ),
        can_add=can_add(config),
        addition=addition,
        is_adding=addition is not None and addition.is_running(now),
    )


def read_playground(db: Connection, tenant: TenantRecord, now: float) -> PlaygroundPage:
    """Read the base models and the newest checkpoints of a tenant that can be sampled from."""
    records, _ = checkpoints.list_page(
        db, tenant.id, limit=MAX_CHECKPOINTS, offset=0, now=now, with_external=False
    )
    run_ids = {record.run_id for record in records}
    found = [run for run_id in sorted(run_ids) if (run := runs.find(db, run_id)) is not None]
    names = {each.run.id: each.name or "" for each in summarize_runs(db, found, now)}
    return PlaygroundPage(
        base_models=[model for model in list_served_models(db) if model.is_sampleable],
        checkpoints=[
            CheckpointChoice(checkpoint=record, run_name=names.get(record.run_id, ""))
            for record in records
        ],
    )


@dataclass(frozen=True, slots=True)
class _Size:
    weight_bytes: int
    num_parameters: int | None


def _row(model: BaseModel, sizes: Mapping[str, _Size]) -> ModelRow:
    size = sizes.get(model.name)
    return ModelRow(
        model=model,
        weight_bytes=size.weight_bytes if size else None,
        num_parameters=size.num_parameters if size else None,
    )


def _read_sizes(config: ServerConfig) -> dict[str, _Size]:
    """The sizes of the models whose folders are on this machine."""
    if config.engine == "fake" or config.dtype not in DTYPE_BYTES:
        return {}
    sizes = {}
    for name, location in _read_sources(config).items():
        if not is_folder_location(location):
            continue
        try:
            folder = read_model_folder(expand_path(location))
        except ConfigError:
            # The worker reports models that cannot be used.
            continue
        sizes[name] = _Size(folder.num_bytes(config.dtype), folder.weights.num_parameters)
    return sizes


def _read_sources(config: ServerConfig) -> dict[str, str]:
    try:
        return BaseModelList(Home(config.home).models_file, config.models).read_sources()
    except ConfigError:
        return {}
