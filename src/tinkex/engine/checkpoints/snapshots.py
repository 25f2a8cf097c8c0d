"""Snapshots of adapters: everything that decides what one does next, in one file, bit by bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from tinkex.engine.adapters import AdapterState
from tinkex.engine.checkpoints.adapter_files import named_lora_tensors
from tinkex.engine.checkpoints.metadata import (
    SNAPSHOT_NAME,
    AdapterMetadata,
    Count,
    TrainerState,
    check_format,
    short_path,
)
from tinkex.engine.checkpoints.safetensors_io import (
    NamedTensor,
    open_tensors,
    read_tensors_into,
    write_tensors,
)
from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import CheckpointError, ConfigError
from tinkex.nn.lora_layout import LoraLayout
from tinkex.types.base import preload_type

#: Under what name the file says what it is.
_METADATA_KEY = "tinkex"


class SnapshotMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot is of."""

    summary: AdapterMetadata
    state: TrainerState
    num_parameters: Count
    has_gradient: bool
    has_moments: bool = True
    """Whether the optimizer's buffers are in the file; before the first step they are zeros."""


def write_snapshot(
    directory: Path, spec: AdapterSpec, layout: LoraLayout, state: AdapterState
) -> None:
    """Write a state, the gathered gradient included."""
    about = SnapshotMetadata(
        summary=AdapterMetadata.from_spec(spec),
        state=TrainerState.from_spec(spec, state.num_steps),
        num_parameters=layout.num_parameters,
        has_gradient=state.gradient is not None,
        has_moments=state.first is not None,
    )
    tensors = _named_tensors(layout, state)
    text = msgspec.json.encode(about).decode()
    write_tensors(directory / SNAPSHOT_NAME, tensors, {_METADATA_KEY: text})


def read_snapshot(directory: Path, spec: AdapterSpec, layout: LoraLayout) -> AdapterState:
    """The state as it was, on the host; CheckpointError if the file is not of such an adapter."""
    path = directory / SNAPSHOT_NAME
    about = _read_metadata(path)
    wanted = AdapterMetadata.from_spec(spec)
    if about.summary != wanted:
        raise CheckpointError(f"{short_path(path)} is of {about.summary}, expected {wanted}")
    if about.num_parameters != layout.num_parameters:
        # Not damage: the state is whole, and can be used when the model is back.
        raise ConfigError(
            f"base model {spec.base_model!r} is not what it was: an adapter of rank {spec.rank} "
            f"had {about.num_parameters} parameters and has {layout.num_parameters} now; put the "
            "former model back"
        )
    state = AdapterState.from_weights(torch.zeros(layout.size))
    state.num_steps = about.state.num_steps
    if about.has_moments:
        state.ensure_moments()
    if about.has_gradient:
        state.gradient = torch.zeros(layout.size)
    # A state that went wrong is still the state that was promised.
    read_tensors_into(path, _named_tensors(layout, state), require_finite=False)
    return state


def _named_tensors(layout: LoraLayout, state: AdapterState) -> list[NamedTensor]:
    """The pairs of every allocated buffer."""
    return [
        pair
        for name, flat in state.buffers().items()
        for pair in named_lora_tensors(name, layout, flat)
    ]


def _read_metadata(path: Path) -> SnapshotMetadata:
    with open_tensors(path) as file:
        metadata = file.metadata() or {}
    try:
        about = msgspec.json.decode(
            metadata.get(_METADATA_KEY, ""), type=preload_type(SnapshotMetadata)
        )
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{short_path(path)} does not say what it is: {error}") from None
    check_format(path, about.summary.format)
    return about
