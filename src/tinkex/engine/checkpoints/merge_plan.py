"""Plans a merge: the delta of each parameter, and the tensors of the merged model.

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
    """scale * B A for one weight, computed in chunks and never held as a whole."""

    down: Tensor
    """(R, K), or (E, R, K) for expert weights."""
    up: Tensor
    """(N, R), or (E, N, R)."""
    scale: float
    is_transposed: bool = False
    """Whether the expert weights have inputs before outputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        sizes = (self.up.shape[-2], self.down.shape[-1])
        return (*self.up.shape[:-2], *(reversed(sizes) if self.is_transposed else sizes))

    def rows(self, start: int, stop: int) -> Tensor:
        """The delta of rows `start` to `stop` on the weight's first axis."""
        up = self.up[start:stop]
        down = self.down[start:stop] if up.ndim == 3 else self.down
        product = (up @ down).mul_(self.scale)
        return product.mT if self.is_transposed else product


def read_deltas(folder: Path, model: PreTrainedModel) -> dict[str, WeightDelta]:
    """Read an adapter's deltas by parameter name; raises InvalidInput if it does not match.

    The model may be on the meta device, because its weights are not read.
    """
    config = read_peft_config(folder)
    expert_prefixes = tensor_prefixes((), _find_expert_parameters(model, config))
    parameter_by_prefix = {prefix: name for name, prefix in expert_prefixes.items()}
    modules = dict(model.named_modules())
    deltas = {}
    for prefix, pair in _read_lora_pairs(folder / WEIGHTS_NAME).items():
        parameter = parameter_by_prefix.get(prefix)
        match = (
            _match_linear(prefix, pair, modules)
            if parameter is None
            else _match_experts(parameter, pair, model)
        )
        deltas[match.name] = WeightDelta(
            down=match.down, up=match.up, scale=config.scale, is_transposed=match.is_transposed
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
    """The adapted expert parameters, in the model's order."""
    targets = config.target_parameters or ()
    suffixes = tuple(f".{target}" for target in targets)
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    return [name for name in names if name in targets or name.endswith(suffixes)]


def _read_lora_pairs(path: Path) -> dict[str, _LoraTensors]:
    with open_tensors(path) as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name).float() for name in names if is_lora_tensor(name)}
    for name, tensor in tensors.items():
        counterpart = (
            name.replace(LORA_A_SUFFIX, LORA_B_SUFFIX)
            if name.endswith(LORA_A_SUFFIX)
            else name.replace(LORA_B_SUFFIX, LORA_A_SUFFIX)
        )
        if counterpart == name or counterpart not in tensors or tensor.ndim != 2:
            raise InvalidInput(f"{short_path(path)}: {name} is not part of a LoRA pair")
        if not max_abs(tensor) < inf:
            raise InvalidInput(f"{short_path(path)}: {name} has non-finite values")
    ups = [name for name in tensors if name.endswith(LORA_B_SUFFIX)]
    return {
        name.removesuffix(LORA_B_SUFFIX): _LoraTensors(
            tensors[name.replace(LORA_B_SUFFIX, LORA_A_SUFFIX)], tensors[name]
        )
        for name in ups
    }


def _match_linear(
    prefix: str, pair: _LoraTensors, modules: Mapping[str, nn.Module]
) -> _MatchedDelta:
    path = prefix.removeprefix(PEFT_PREFIX)
    module = modules.get(path)
    if not isinstance(module, nn.Linear):
        raise InvalidInput(
            f"the adapter has {path!r}, which is not a linear layer of the base model"
        )
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
            f"{tuple(pair.down.shape)}, but the base model's weight has {tuple(expected)}; use the "
            "base model that the adapter was trained on"
        )


class DeltaSource(NamedTuple):
    """The delta that is added to a stored tensor."""

    parameter: str
    """The model parameter that the delta belongs to."""
    part: str | None = None
    """The stored tensor's name, if the parameter is stored in several tensors."""


class OutputTensor(NamedTuple):
    """A tensor of the merged model."""

    spec: TensorSpec
    file_name: str
    stored_name: str
    """The base model's tensor that it is computed from."""
    source: DeltaSource | None


class TiedWeights(NamedTuple):
    """The names of the LM head and the embedding if they share their weight."""

    head: str
    embedding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """All tensors of a merged model, in write order."""

    files: Sequence[str]
    tensors: Sequence[OutputTensor]
    is_untied: bool
    """Whether the LM head becomes a separate tensor."""


def plan_merge(
    folder: Path, model: PreTrainedModel, deltas: Mapping[str, WeightDelta], code: str | None
) -> MergePlan | None:
    """Plan a streaming merge; returns None if the files require loading the whole model.

    `code` is the dtype to write; None keeps the stored one.
    """
    stored = {spec.name: (file_name, spec) for file_name, spec in _list_tensors(folder)}
    tie = find_tied_weights(model)
    untied = tie if tie is not None and tie.head in deltas else None
    direct = {
        name: delta for name, delta in deltas.items() if untied is None or name != untied.head
    }
    sources = _match_deltas(model, direct, {name: spec for name, (_, spec) in stored.items()})
    if not stored or sources is None or (untied and untied.embedding not in stored):
        return None
    tensors = [
        OutputTensor(_with_dtype_code(spec, code), file_name, name, sources.get(name))
        for name, (file_name, spec) in stored.items()
    ]
    if untied is not None:
        head = _untied_head(model, untied, *stored[untied.embedding], code)
        # Some folders also store the tied head, which is not used.
        tensors = [tensor for tensor in tensors if tensor.spec.name != head.spec.name] + [head]
    tensors.sort(key=_write_order)
    files = list(dict.fromkeys(tensor.file_name for tensor in tensors))
    return MergePlan(files=files, tensors=tensors, is_untied=untied is not None)


def find_tied_weights(model: PreTrainedModel) -> TiedWeights | None:
    """The LM head and the embedding, if they are tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return TiedWeights(f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight")


def split_parameter(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split a parameter, or its delta, into the tensors that are stored for it."""
    parts: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return parts


# --- stored tensors ------------------------------------------------------------------------------


def _list_tensors(folder: Path) -> Iterable[tuple[str, TensorSpec]]:
    """All tensors with their file names; none if the folder has no safetensors."""
    single, index = SAFETENSORS
    if (folder / single).is_file():
        files = [single]
    elif (folder / index).is_file():
        weight_map = read_json(folder / index)["weight_map"]
        assert isinstance(weight_map, dict)  # as `read_model_folder` has checked
        files = sorted(set(weight_map.values()))
    else:
        files = []
    for file_name in files:
        for name, entry in read_header(folder / file_name).items():
            yield file_name, TensorSpec(name, entry["dtype"], tuple(entry["shape"]))


def _match_deltas(
    model: PreTrainedModel, deltas: Mapping[str, WeightDelta], stored: Mapping[str, TensorSpec]
) -> dict[str, DeltaSource] | None:
    """Assign deltas to stored tensors; returns None if one does not match any."""
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
    spec = _with_dtype_code(embedding._replace(name=name), code)
    return OutputTensor(spec, file_name, tie.embedding, DeltaSource(tie.head))


def _with_dtype_code(spec: TensorSpec, code: str | None) -> TensorSpec:
    is_float = spec.code in DTYPE_CODES.values()
    return spec._replace(code=code) if code is not None and is_float else spec


def _write_order(tensor: OutputTensor) -> tuple[str, int, str, str]:
    # Wide dtypes first, so that all tensors are aligned; parts of a parameter together.
    parameter = tensor.source.parameter if tensor.source else ""
    return tensor.file_name, -dtype_bytes(tensor.spec.code), parameter, tensor.spec.name
