"""Snapshots of adapters: the complete training state, bit-exact in one file."""

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

#: The key of our metadata in the safetensors header.
_METADATA_KEY = "tinkex"


class SnapshotMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a snapshot."""

    summary: AdapterMetadata
    state: TrainerState
    num_parameters: Count
    has_gradient: bool
    has_moments: bool = True
    """Whether the file has the optimizer's moments; before the first step they are zeros."""


def write_snapshot(
    directory: Path, spec: AdapterSpec, layout: LoraLayout, state: AdapterState
) -> None:
    """Write a state, including the accumulated gradient."""
    metadata = SnapshotMetadata(
        summary=AdapterMetadata.from_spec(spec),
        state=TrainerState.from_spec(spec, state.num_steps),
        num_parameters=layout.num_parameters,
        has_gradient=state.gradient is not None,
        has_moments=state.first is not None,
    )
    tensors = _named_tensors(layout, state)
    text = msgspec.json.encode(metadata).decode()
    write_tensors(directory / SNAPSHOT_NAME, tensors, {_METADATA_KEY: text})


def read_snapshot(directory: Path, spec: AdapterSpec, layout: LoraLayout) -> AdapterState:
    """Read a state to CPU memory; raises CheckpointError if it is not of such an adapter."""
    path = directory / SNAPSHOT_NAME
    metadata = _read_metadata(path)
    expected = AdapterMetadata.from_spec(spec)
    if metadata.summary != expected:
        raise CheckpointError(f"{short_path(path)} is of {metadata.summary}, expected {expected}")
    if metadata.num_parameters != layout.num_parameters:
        # Not damage: the state can be used once the former model is back.
        raise ConfigError(
            f"base model {spec.base_model!r} has changed: an adapter of rank {spec.rank} had "
            f"{metadata.num_parameters} parameters and now has {layout.num_parameters}; restore "
            "the former model"
        )
    state = AdapterState.from_weights(torch.zeros(layout.size))
    state.num_steps = metadata.state.num_steps
    if metadata.has_moments:
        state.ensure_moments()
    if metadata.has_gradient:
        state.gradient = torch.zeros(layout.size)
    # A state with NaN or infinity is restored as it was.
    read_tensors_into(path, _named_tensors(layout, state), require_finite=False)
    return state


def _named_tensors(layout: LoraLayout, state: AdapterState) -> list[NamedTensor]:
    """The LoRA pairs of every allocated buffer."""
    return [
        pair
        for name, flat in state.buffers().items()
        for pair in named_lora_tensors(name, layout, flat)
    ]


def _read_metadata(path: Path) -> SnapshotMetadata:
    with open_tensors(path) as file:
        header = file.metadata() or {}
    try:
        metadata = msgspec.json.decode(
            header.get(_METADATA_KEY, ""), type=preload_type(SnapshotMetadata)
        )
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{short_path(path)} has no valid metadata: {error}") from None
    check_format(path, metadata.summary.format)
    return metadata
