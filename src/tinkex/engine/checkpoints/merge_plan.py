"""How the stored tensors of a model folder take up an adapter: a plan, made from names and shapes.

transformers may store a parameter under another name or in parts (a file for each expert of a
table, say); it knows the way back, which is as good for what is added as for the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tinkex.engine.checkpoints.deltas import WeightDelta
from tinkex.engine.checkpoints.tensor_files import DTYPE_CODES, TensorSpec, dtype_bytes
from tinkex.engine.models.weight_files import SAFETENSORS, read_header, read_json


class DeltaSource(NamedTuple):
    """What is added to a stored tensor."""

    parameter: str
    """The parameter whose delta it is."""
    part: str | None = None
    """The stored tensor's name, if the parameter is stored in parts."""


class OutputTensor(NamedTuple):
    """A tensor to write."""

    spec: TensorSpec
    file_name: str
    stored_name: str
    """The tensor that it begins as."""
    source: DeltaSource | None


class TiedWeights(NamedTuple):
    """Parameters that are one and the same in a model, by name."""

    head: str
    embedding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """Every tensor of a merged model, in the order in which it is written."""

    files: Sequence[str]
    tensors: Sequence[OutputTensor]
    is_untied: bool
    """Whether the head becomes a tensor of its own."""


def plan_merge(
    folder: Path, model: PreTrainedModel, deltas: Mapping[str, WeightDelta], code: str | None
) -> MergePlan | None:
    """A plan, or None if the files are such that the model has to be loaded whole.

    `code` is the number format to write; None keeps what is there.
    """
    stored = {entry.name: (name, entry) for name, entry in _list_tensors(folder)}
    tie = find_tied_weights(model)
    untied = tie if tie is not None and tie.head in deltas else None
    direct = {
        name: delta for name, delta in deltas.items() if untied is None or name != untied.head
    }
    sources = _match_deltas(model, direct, {name: entry for name, (_, entry) in stored.items()})
    if not stored or sources is None or (untied and untied.embedding not in stored):
        return None
    pieces = [
        OutputTensor(_with_dtype_code(entry, code), file_name, name, sources.get(name))
        for name, (file_name, entry) in stored.items()
    ]
    if untied is not None:
        head = _untied_head(model, untied, *stored[untied.embedding], code)
        # Some folders have the head as well, though it is not used.
        pieces = [piece for piece in pieces if piece.spec.name != head.spec.name] + [head]
    pieces.sort(key=_write_order)
    files = list(dict.fromkeys(piece.file_name for piece in pieces))
    return MergePlan(files=files, tensors=pieces, is_untied=untied is not None)


def find_tied_weights(model: PreTrainedModel) -> TiedWeights | None:
    """The head and the embedding, if they are one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return TiedWeights(f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight")


def split_parameter(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter, or what is added to it, as it is stored."""
    parts: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return parts


# --- what is there -------------------------------------------------------------------------------


def _list_tensors(folder: Path) -> Iterable[tuple[str, TensorSpec]]:
    """Every tensor with its file's name; none if there are no safetensors."""
    single, index = SAFETENSORS
    if (folder / single).is_file():
        files = [single]
    elif (folder / index).is_file():
        files = sorted(set(read_json(folder / index)["weight_map"].values()))
    else:
        files = []
    for file_name in files:
        for name, entry in read_header(folder / file_name).items():
            yield file_name, TensorSpec(name, entry["dtype"], tuple(entry["shape"]))


def _match_deltas(
    model: PreTrainedModel, deltas: Mapping[str, WeightDelta], stored: Mapping[str, TensorSpec]
) -> dict[str, DeltaSource] | None:
    """What is added to which stored tensor; None if some of it has no place."""
    sources: dict[str, DeltaSource] = {}
    for name, delta in deltas.items():
        if name in stored and tuple(stored[name].shape) == delta.shape:
            sources[name] = DeltaSource(name)
            continue
        parts = split_parameter(model, name, torch.empty(delta.shape, device="meta"))
        for part, tensor in parts.items():
            if part not in stored or tuple(stored[part].shape) != tuple(tensor.shape):
                return None
            sources[part] = DeltaSource(name, part)
    return sources


def _untied_head(
    model: PreTrainedModel,
    tie: TiedWeights,
    file_name: str,
    embedding: TensorSpec,
    code: str | None,
) -> OutputTensor:
    [name] = split_parameter(model, tie.head, torch.empty(embedding.shape, device="meta"))
    entry = _with_dtype_code(embedding._replace(name=name), code)
    return OutputTensor(entry, file_name, tie.embedding, DeltaSource(tie.head))


def _with_dtype_code(spec: TensorSpec, code: str | None) -> TensorSpec:
    is_number = spec.code in DTYPE_CODES.values()
    return spec._replace(code=code) if code is not None and is_number else spec


def _write_order(tensor: OutputTensor) -> tuple[str, int, str, str]:
    # Wide numbers first, so that all are aligned; the parts of a parameter together.
    parameter = tensor.source.parameter if tensor.source else ""
    return tensor.file_name, -dtype_bytes(tensor.spec.code), parameter, tensor.spec.name
