"""Reads and writes adapter checkpoints and snapshots.

A checkpoint is a PEFT folder plus metadata and optimizer state. Folders written by PEFT itself can
be read too. Invalid tensors in a tinkex checkpoint are damage (CheckpointError); in a PEFT folder
they are the user's mistake (InvalidInput). A snapshot is the complete training state, bit-exact in
one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tinkex.engine.adapters import MOMENTS, AdapterState, layout_for, optimizer_type
from tinkex.engine.checkpoints import peft_format
from tinkex.engine.checkpoints.metadata import (
    CONFIG_NAME,
    METADATA_NAME,
    OPTIMIZER_NAME,
    SNAPSHOT_NAME,
    STATE_NAME,
    WEIGHTS_NAME,
    AdapterMetadata,
    Count,
    TrainerState,
    check_compatible,
    check_format,
    read_metadata,
    read_trainer_state,
    short_path,
    write_json,
)
from tinkex.engine.checkpoints.safetensors_io import (
    DTYPE_CODES,
    NamedTensor,
    open_tensors,
    read_tensors_into,
    write_tensors,
)
from tinkex.engine.protocol import AdapterSpec, matches_module
from tinkex.errors import CheckpointError, ConfigError, InvalidInput
from tinkex.nn.lora_layout import LoraLayout, LoraTarget, TargetKind
from tinkex.types.base import preload_type

#: The key of our metadata in the safetensors header.
_METADATA_KEY = "tinkex"


class SavedOptimizerState(NamedTuple):
    """The optimizer state in flat buffers."""

    first: Tensor
    second: Tensor | None
    num_steps: int


class SavedAdapter(NamedTuple):
    """Weights in a flat buffer, their layout and the scale of their update."""

    layout: LoraLayout
    weights: Tensor
    scale: float


def write_checkpoint(
    directory: Path,
    spec: AdapterSpec,
    layout: LoraLayout,
    state: AdapterState,
    *,
    with_optimizer: bool,
) -> None:
    """Write a PEFT adapter, its metadata and optionally the optimizer state."""
    write_json(directory / CONFIG_NAME, peft_format.build_peft_config(spec, layout))
    write_json(directory / METADATA_NAME, AdapterMetadata.from_spec(spec))
    write_tensors(directory / WEIGHTS_NAME, peft_format.peft_tensors(layout, state.weights.cpu()))
    if with_optimizer:
        write_json(directory / STATE_NAME, TrainerState.from_spec(spec, state.num_steps))
        # Before the first step the moments are zeros.
        zeros = torch.zeros(layout.size) if state.first is None else None
        moments = {name: getattr(state, name) for name in MOMENTS[optimizer_type(spec)]}
        write_tensors(
            directory / OPTIMIZER_NAME,
            [
                pair
                for name, flat in moments.items()
                for pair in named_lora_tensors(name, layout, flat.cpu() if zeros is None else zeros)
            ],
        )


def read_adapter_weights(directory: Path, spec: AdapterSpec, layout: LoraLayout) -> Tensor:
    """Read weights to a flat CPU buffer; raises InvalidInput if they do not match the adapter.

    Weights of another scale are rescaled, so that the update is the same.
    """
    if (directory / METADATA_NAME).exists():
        metadata = read_metadata(directory)
        check_compatible(metadata, spec)
        flat, scale = _read_tinkex_weights(directory, layout), metadata.scale
    else:
        config = peft_format.read_peft_config(directory)
        peft_format.check_rank(config, layout.rank)
        flat, scale = _read_peft_weights(directory, layout), config.scale
    peft_format.rescale(layout, flat, scale / spec.scale)
    return flat


def read_adapter(directory: Path, base_model: str, targets: Sequence[LoraTarget]) -> SavedAdapter:
    """Read weights of any rank and modules, for a base model with these LoRA targets."""
    if (directory / METADATA_NAME).exists():
        metadata = read_metadata(directory)
        if metadata.base_model != base_model:
            raise InvalidInput(
                f"the checkpoint is of base model {metadata.base_model!r}, not of {base_model!r}"
            )
        layout = layout_for(targets, metadata)
        return SavedAdapter(layout, _read_tinkex_weights(directory, layout), metadata.scale)
    config = peft_format.read_peft_config(directory)
    modules = _find_modules(directory, config, targets)
    layout = LoraLayout(targets, config.r, set(TargetKind), modules)
    return SavedAdapter(layout, _read_peft_weights(directory, layout), config.scale)


def read_optimizer(directory: Path, spec: AdapterSpec, layout: LoraLayout) -> SavedOptimizerState:
    """Read an optimizer state, which must be of the spec's type."""
    state = read_trainer_state(directory, spec)
    saved = read_metadata(directory)
    if saved.scale != spec.scale:
        raise InvalidInput(
            f"the checkpoint was saved with alpha {saved.alpha:g} and use_rslora "
            f"{saved.use_rslora}, but the adapter has {spec.alpha:g} and {spec.use_rslora}; load "
            "it without the optimizer, or create one with the same"
        )
    moments = {name: torch.zeros(layout.size) for name in MOMENTS[optimizer_type(spec)]}
    pairs = [
        pair for name, flat in moments.items() for pair in named_lora_tensors(name, layout, flat)
    ]
    read_tensors_into(directory / OPTIMIZER_NAME, pairs)
    return SavedOptimizerState(moments["first"], moments.get("second"), state.num_steps)


def named_lora_tensors(prefix: str, layout: LoraLayout, flat: Tensor) -> list[NamedTensor]:
    """A buffer's LoRA pairs by module name, which does not depend on the buffer layout."""
    return [
        NamedTensor(f"{prefix}.{pair.path}.{side}", tensor)
        for pair in layout.pairs(flat)
        for side, tensor in (("lora_A", pair.down), ("lora_B", pair.up))
    ]


# --- both kinds of folders -----------------------------------------------------------------------


def _read_tinkex_weights(directory: Path, layout: LoraLayout) -> Tensor:
    flat = torch.zeros(layout.size)
    read_tensors_into(directory / WEIGHTS_NAME, peft_format.peft_tensors(layout, flat))
    return flat


def _read_peft_weights(directory: Path, layout: LoraLayout) -> Tensor:
    flat = torch.zeros(layout.size)
    read_tensors_into(
        directory / WEIGHTS_NAME,
        peft_format.peft_tensors(layout, flat),
        codes=tuple(DTYPE_CODES.values()),
        error=InvalidInput,
        is_relevant=peft_format.is_lora_tensor,
    )
    return flat


def _find_modules(
    directory: Path, config: peft_format.PeftConfig, targets: Sequence[LoraTarget]
) -> set[str]:
    """The modules of the model that have a pair; reading refuses pairs of any other."""
    with open_tensors(directory / WEIGHTS_NAME) as file:
        names = file.keys()
    saved = {peft_format.module_path(name) for name in names if peft_format.is_lora_tensor(name)}
    modules = {path for target in targets if not target.num_experts for path in target.paths}
    parameters = {path for target in targets if target.num_experts for path in target.paths}
    named = config.target_parameters or ()
    return (modules & saved) | {
        path
        for path in parameters
        if path.rpartition(".")[0] in saved and any(matches_module(path, name) for name in named)
    }


# --- snapshots -----------------------------------------------------------------------------------


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
        state.ensure_moments(spec)
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
