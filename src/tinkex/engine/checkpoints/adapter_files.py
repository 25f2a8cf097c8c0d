"""Checkpoints of adapters: PEFT folders, with what an optimizer needs to go on beside them.

A folder that PEFT itself wrote can be read too. Wrong numbers in one of ours are damage, in one
of somebody else's a mistake of its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.adapters import AdapterState
from tinkex.engine.checkpoints import peft_format
from tinkex.engine.checkpoints.metadata import (
    CONFIG_NAME,
    METADATA_NAME,
    OPTIMIZER_NAME,
    STATE_NAME,
    WEIGHTS_NAME,
    AdapterMetadata,
    TrainerState,
    check_compatible,
    read_metadata,
    read_trainer_state,
    write_json,
)
from tinkex.engine.checkpoints.safetensors_io import (
    DTYPE_CODES,
    NamedTensor,
    open_tensors,
    read_tensors_into,
    write_tensors,
)
from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import InvalidInput
from tinkex.nn.lora_layout import LoraLayout, LoraTarget, TargetKind


class SavedOptimizerState(NamedTuple):
    """What an optimizer needs to go on, in flat buffers."""

    first: Tensor
    second: Tensor
    num_steps: int


class SavedAdapter(NamedTuple):
    """Weights, and what lies where in them."""

    layout: LoraLayout
    weights: Tensor


def write_checkpoint(
    directory: Path,
    spec: AdapterSpec,
    layout: LoraLayout,
    state: AdapterState,
    *,
    with_optimizer: bool,
) -> None:
    """Write a PEFT adapter, what it fits, and the optimizer's memory if asked for."""
    write_json(directory / CONFIG_NAME, peft_format.build_peft_config(spec.base_model, layout))
    write_json(directory / METADATA_NAME, AdapterMetadata.from_spec(spec))
    write_tensors(directory / WEIGHTS_NAME, peft_format.peft_tensors(layout, state.weights.cpu()))
    if with_optimizer:
        write_json(directory / STATE_NAME, TrainerState.from_spec(spec, state.num_steps))
        first, second = state.first, state.second
        if first is None or second is None:
            # Not allocated before the first step, when they are zeros.
            first = second = torch.zeros(layout.size)
        moments = named_lora_tensors("first", layout, first.cpu())
        moments += named_lora_tensors("second", layout, second.cpu())
        write_tensors(directory / OPTIMIZER_NAME, moments)


def read_adapter_weights(directory: Path, spec: AdapterSpec, layout: LoraLayout) -> Tensor:
    """Saved weights as a flat buffer on the host; InvalidInput if they do not fit the adapter."""
    if (directory / METADATA_NAME).exists():
        check_compatible(read_metadata(directory), spec)
        return _read_tinkex_weights(directory, layout)
    config = peft_format.read_peft_config(directory)
    peft_format.check_rank(config, layout.rank)
    return _read_peft_weights(directory, layout, config)


def read_adapter(directory: Path, base_model: str, sites: Sequence[LoraTarget]) -> SavedAdapter:
    """Saved weights of whatever shape they have, for a base model with these sites."""
    if (directory / METADATA_NAME).exists():
        summary = read_metadata(directory)
        if summary.base_model != base_model:
            raise InvalidInput(
                f"the checkpoint is of base model {summary.base_model!r}, not of {base_model!r}"
            )
        layout = LoraLayout(sites, summary.rank, target_kinds(summary))
        return SavedAdapter(layout, _read_tinkex_weights(directory, layout))
    config = peft_format.read_peft_config(directory)
    layout = LoraLayout(sites, config.r, _find_target_kinds(directory, sites))
    return SavedAdapter(layout, _read_peft_weights(directory, layout, config))


def read_optimizer(directory: Path, spec: AdapterSpec, layout: LoraLayout) -> SavedOptimizerState:
    """The saved memory of an optimizer, which must be of the spec's type."""
    state = read_trainer_state(directory, spec)
    first, second = torch.zeros(layout.size), torch.zeros(layout.size)
    tables = named_lora_tensors("first", layout, first) + named_lora_tensors(
        "second", layout, second
    )
    read_tensors_into(directory / OPTIMIZER_NAME, tables)
    return SavedOptimizerState(first, second, state.num_steps)


def target_kinds(source: AdapterMetadata | AdapterSpec) -> set[TargetKind]:
    """Which parts of a model an adapter has pairs for."""
    chosen = {
        TargetKind.ATTENTION: source.train_attn,
        TargetKind.MLP: source.train_mlp,
        TargetKind.UNEMBED: source.train_unembed,
    }
    return {part for part, is_trained in chosen.items() if is_trained}


def named_lora_tensors(prefix: str, layout: LoraLayout, flat: Tensor) -> list[NamedTensor]:
    """A buffer's pairs by module; names outlive a change of where things lie in a buffer."""
    return [
        NamedTensor(f"{prefix}.{pair.path}.{side}", tensor)
        for pair in layout.pairs(flat)
        for side, tensor in (("lora_A", pair.down), ("lora_B", pair.up))
    ]


# --- whose folder it is --------------------------------------------------------------------------


def _read_tinkex_weights(directory: Path, layout: LoraLayout) -> Tensor:
    flat = torch.zeros(layout.size)
    read_tensors_into(directory / WEIGHTS_NAME, peft_format.peft_tensors(layout, flat))
    return flat


def _read_peft_weights(
    directory: Path, layout: LoraLayout, config: peft_format.PeftConfig
) -> Tensor:
    flat = torch.zeros(layout.size)
    read_tensors_into(
        directory / WEIGHTS_NAME,
        peft_format.peft_tensors(layout, flat),
        codes=tuple(DTYPE_CODES.values()),
        error=InvalidInput,
        is_relevant=peft_format.is_lora_tensor,
    )
    peft_format.rescale([pair.up for pair in layout.pairs(flat)], config)
    return flat


def _find_target_kinds(directory: Path, sites: Sequence[LoraTarget]) -> set[TargetKind]:
    """The parts that an adapter has any pair for; whether it has all is seen when it is read."""
    with open_tensors(directory / WEIGHTS_NAME) as file:
        names = file.keys()
    found = {peft_format.module_path(name) for name in names if peft_format.is_lora_tensor(name)}
    return {site.kind for site in sites if not found.isdisjoint(_module_paths(site))}


def _module_paths(site: LoraTarget) -> set[str]:
    is_table = site.num_experts > 0
    return {path.rpartition(".")[0] if is_table else path for path in site.paths}
