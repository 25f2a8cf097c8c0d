"""PEFT's file format: names and shapes of LoRA tensors, and `adapter_config.json`.

Shape letters: K inputs, N outputs, R rank, E experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tinkex.engine.checkpoints.metadata import CONFIG_NAME, read_struct, short_path
from tinkex.engine.checkpoints.safetensors_io import NamedTensor
from tinkex.engine.protocol import AdapterSpec, lora_scale
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.nn.lora_layout import LoraLayout
from tinkex.types.base import preload_type

#: The prefix that PEFT's wrappers add to tensor names.
PEFT_PREFIX = "base_model.model."
_LORA_MARK = ".lora_"
LORA_A_SUFFIX, LORA_B_SUFFIX = ".lora_A.weight", ".lora_B.weight"

_UNSET_VALUES: tuple[object, ...] = (None, False, "none", [], {})
#: Options that make an adapter more than plain LoRA pairs.
_UNSUPPORTED_OPTIONS = (
    "use_dora",
    "bias",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
#: In a mixture-of-experts model, PEFT treats modules of these names as single experts. Listing
#: their weights as parameters instead has the same effect without that treatment.
_EXPERT_MODULE_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
#: Initializations that do not change the base weights.
_SUPPORTED_INITS: tuple[object, ...] = (True, False, "gaussian", "eva", "orthogonal")


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The relevant fields of `adapter_config.json`."""

    peft_type: str
    r: int
    lora_alpha: float = 8
    use_rslora: bool = False
    target_parameters: list[str] | None = None
    """Expert weights, which are parameters and not modules."""

    @property
    def scale(self) -> float:
        """The scale of the low-rank update."""
        return lora_scale(self.lora_alpha, self.r, use_rslora=self.use_rslora)


def build_peft_config(spec: AdapterSpec, layout: LoraLayout) -> dict[str, object]:
    """The `adapter_config.json` of an adapter, with the full names of its modules."""
    pairs = list(layout.pairs(torch.empty(layout.size, device="meta")))
    modules = [pair.path for pair in pairs if pair.down.ndim == 2]
    parameters = [pair.path for pair in pairs if pair.down.ndim == 3]
    if parameters:
        is_ambiguous = {path: path.rpartition(".")[2] in _EXPERT_MODULE_NAMES for path in modules}
        parameters += [f"{path}.weight" for path in modules if is_ambiguous[path]]
        modules = [path for path in modules if not is_ambiguous[path]]
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base_model,
        "r": layout.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": spec.use_rslora,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": modules,
    }
    return config | ({"target_parameters": parameters} if parameters else {})


def read_peft_config(directory: Path) -> PeftConfig:
    """Read a PEFT config; raises InvalidInput if it is not plain LoRA."""
    path = directory / CONFIG_NAME
    fields = read_struct(path, dict[str, object])
    try:
        config = msgspec.convert(fields, preload_type(PeftConfig))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{short_path(path)} cannot be read: {error}") from None
    if config.peft_type != "LORA" or config.r < 1:
        raise InvalidInput(
            f"the adapter's peft_type is {config.peft_type!r} of rank {config.r}; expected LORA"
        )
    supported = dict.fromkeys(_UNSUPPORTED_OPTIONS, _UNSET_VALUES) | {
        "init_lora_weights": _SUPPORTED_INITS
    }
    for name, values in supported.items():
        if (value := fields.get(name, values[0])) not in values:
            raise InvalidInput(
                f"the adapter was trained with {name} {value!r}; only plain LoRA is supported"
            )
    return config


def tensor_prefixes(paths: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """The tensor name prefixes of modules and of expert parameters, which are in model order.

    PEFT wraps a module once for each of its parameters, so the last one has the outermost wrapper.
    """
    prefixes = {path: f"{PEFT_PREFIX}{path}" for path in paths}
    by_module: dict[str, list[str]] = defaultdict(list)
    for parameter in parameters:
        by_module[parameter.rpartition(".")[0]].append(parameter)
    for module, members in by_module.items():
        for depth, parameter in enumerate(reversed(members)):
            prefixes[parameter] = f"{PEFT_PREFIX}{module}{'.base_layer' * depth}"
    return prefixes


def peft_tensors(layout: LoraLayout, flat: Tensor) -> list[NamedTensor]:
    """An adapter's LoRA pairs with PEFT's names and shapes, as views of a buffer."""
    pairs = list(layout.pairs(flat))
    names = tensor_prefixes(
        [pair.path for pair in pairs if pair.down.ndim == 2],
        [pair.path for pair in pairs if pair.down.ndim == 3],
    )
    tensors = []
    for path, down, up in pairs:
        down_name, up_name = f"{names[path]}{LORA_A_SUFFIX}", f"{names[path]}{LORA_B_SUFFIX}"
        if down.ndim == 2:
            tensors += [NamedTensor(down_name, down), NamedTensor(up_name, up)]
            continue
        num_experts, rank, size = down.shape
        up_NRE = up.permute(1, 2, 0)
        tensors += [
            NamedTensor(down_name, down, (num_experts * rank, size)),
            NamedTensor(up_name, up_NRE, (up_NRE.shape[0], rank * num_experts)),
        ]
    return tensors


def is_lora_tensor(name: str) -> bool:
    """Whether a tensor is a LoRA weight; PEFT may also save copies of frozen embeddings."""
    return _LORA_MARK in name


def module_path(name: str) -> str:
    """The module of a tensor; for an expert parameter, the module that has it."""
    return name.removeprefix(PEFT_PREFIX).partition(_LORA_MARK)[0].replace(".base_layer", "")


def check_rank(config: PeftConfig, rank: int) -> None:
    """Raise InvalidInput for another rank."""
    if config.r != rank:
        raise InvalidInput(
            f"the checkpoint was saved with rank {config.r}, but the adapter has {rank}; create "
            f"one with rank {config.r} to load it"
        )


def rescale(layout: LoraLayout, flat: Tensor, factor: float) -> None:
    """Multiply the B matrices in place: weights of another scale then give the same update."""
    if factor != 1.0:
        for pair in layout.pairs(flat):
            pair.up.mul_(factor)
