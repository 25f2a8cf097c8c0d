"""What an adapter adds to the weights of its base model, parameter by parameter.

Shape letters: K inputs, N outputs, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tinkex.engine.checkpoints.metadata import WEIGHTS_NAME, short_path
from tinkex.engine.checkpoints.peft_format import (
    LORA_A_SUFFIX,
    LORA_B_SUFFIX,
    PEFT_PREFIX,
    PeftConfig,
    is_lora_tensor,
    read_peft_config,
    tensor_prefixes,
)
from tinkex.engine.checkpoints.safetensors_io import (
    DTYPE_CODES,
    TensorSpec,
    dtype_bytes,
    max_abs,
    open_tensors,
)
from tinkex.engine.models.weight_files import SAFETENSORS, read_header, read_json
from tinkex.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelta:
    """scale * B A for one weight, computed piece by piece; it is never whole in memory."""

    down: Tensor
    """(R, K), or (E, R, K) for a table of experts."""
    up: Tensor
    """(N, R), or (E, N, R)."""
    scale: float
    is_transposed: bool = False
    """Whether the table keeps inputs before outputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        sizes = (self.up.shape[-2], self.down.shape[-1])
        return (*self.up.shape[:-2], *(reversed(sizes) if self.is_transposed else sizes))

    def rows(self, start: int, stop: int) -> Tensor:
        """What to add from `start` up to `stop` on the weight's first axis."""
        up = self.up[start:stop]
        down = self.down[start:stop] if up.ndim == 3 else self.down
        product = (up @ down).mul_(self.scale)
        return product.mT if self.is_transposed else product


def read_deltas(folder: Path, model: PreTrainedModel) -> dict[str, WeightDelta]:
    """An adapter's deltas by the names of the model's parameters.

    The model's weights are not read, so it may have none. InvalidInput if the adapter does not fit.
    """
    config = read_peft_config(folder)
    tables = {
        stem: name
        for name, stem in tensor_prefixes((), _find_expert_parameters(model, config)).items()
    }
    modules = dict(model.named_modules())
    deltas = {}
    for stem, pair in _read_lora_pairs(folder / WEIGHTS_NAME).items():
        name = tables.get(stem)
        found = (
            _match_linear(stem, pair, modules)
            if name is None
            else _match_experts(name, pair, model)
        )
        deltas[found.name] = WeightDelta(
            down=found.down, up=found.up, scale=config.scale, is_transposed=found.is_transposed
        )
    return deltas


class _LoraTensors(NamedTuple):
    down: Tensor
    up: Tensor


class _MatchedDelta(NamedTuple):
    name: str
    down: Tensor
    up: Tensor
    is_transposed: bool = False


def _find_expert_parameters(model: PreTrainedModel, config: PeftConfig) -> list[str]:
    """The parameters that are adapted as tables, in the model's order."""
    targets = config.target_parameters or ()
    ends = tuple(f".{target}" for target in targets)
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    return [name for name in names if name in targets or name.endswith(ends)]


def _read_lora_pairs(path: Path) -> dict[str, _LoraTensors]:
    with open_tensors(path) as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name).float() for name in names if is_lora_tensor(name)}
    for name, tensor in tensors.items():
        twin = (
            name.replace(LORA_A_SUFFIX, LORA_B_SUFFIX)
            if name.endswith(LORA_A_SUFFIX)
            else name.replace(LORA_B_SUFFIX, LORA_A_SUFFIX)
        )
        if twin == name or twin not in tensors or tensor.ndim != 2:
            raise InvalidInput(f"{short_path(path)}: {name} is not one of a low-rank pair")
        if not max_abs(tensor) < inf:
            raise InvalidInput(f"{short_path(path)}: {name} has numbers that are not finite")
    ups = [name for name in tensors if name.endswith(LORA_B_SUFFIX)]
    return {
        name.removesuffix(LORA_B_SUFFIX): _LoraTensors(
            tensors[name.replace(LORA_B_SUFFIX, LORA_A_SUFFIX)], tensors[name]
        )
        for name in ups
    }


def _match_linear(stem: str, pair: _LoraTensors, modules: Mapping[str, nn.Module]) -> _MatchedDelta:
    path = stem.removeprefix(PEFT_PREFIX)
    module = modules.get(path)
    if not isinstance(module, nn.Linear):
        raise InvalidInput(f"the adapter is for {path!r}, which is no linear map of the base model")
    _check_shapes(path, pair, module.weight.shape, (*pair.up.shape[:1], *pair.down.shape[1:]))
    return _MatchedDelta(f"{path}.weight", *pair)


def _match_experts(name: str, pair: _LoraTensors, model: PreTrainedModel) -> _MatchedDelta:
    shape = model.get_parameter(name).shape
    module = model.get_submodule(name.rpartition(".")[0])
    is_transposed = bool(getattr(module, "is_transposed", False))
    sizes = (pair.up.shape[0], pair.down.shape[1])
    _check_shapes(name, pair, shape, (shape[0], *(reversed(sizes) if is_transposed else sizes)))
    down_ERK = pair.down.view(shape[0], -1, pair.down.shape[1])
    up_ENR = pair.up.view(pair.up.shape[0], -1, shape[0]).permute(2, 0, 1)
    return _MatchedDelta(name, down_ERK, up_ENR, is_transposed)


def _check_shapes(
    path: str, pair: _LoraTensors, expected: Sequence[int], found: Sequence[int]
) -> None:
    ranks = pair.down.shape[0], pair.up.shape[1]
    num_pairs = expected[0] if len(expected) == 3 else 1
    if tuple(expected) != tuple(found) or ranks[0] != ranks[1] or ranks[0] % num_pairs:
        raise InvalidInput(
            f"the adapter's pair for {path!r} has shapes {tuple(pair.up.shape)} and "
            f"{tuple(pair.down.shape)}, but the base model's weight has {tuple(expected)}; name "
            "the "
            "base model that the adapter was trained on"
        )


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
