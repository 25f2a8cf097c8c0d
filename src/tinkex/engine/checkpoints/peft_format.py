"""PEFT's way to name and shape an adapter's pairs, and to say what they belong to.

Shape letters: K inputs, N outputs, R rank, E experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tinkex.engine.adapters import LORA_ALPHA
from tinkex.engine.checkpoints.metadata import CONFIG_NAME, read_struct, short_path
from tinkex.engine.checkpoints.safetensors_io import NamedTensor
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.nn.lora_layout import LoraLayout
from tinkex.types.base import preload_type

#: PEFT's wrappers around a model, as they show in the names of its tensors.
PEFT_PREFIX = "base_model.model."
_LORA_MARK = ".lora_"
LORA_A_SUFFIX, LORA_B_SUFFIX = ".lora_A.weight", ".lora_B.weight"

_UNSET_VALUES: tuple[Any, ...] = (None, False, "none", [], {})
#: Settings that make an adapter more than low-rank pairs.
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
#: In a model with experts, PEFT takes modules of these names for single experts, wherever they are;
#: their weights can be named instead, which comes to the same.
_EXPERT_MODULE_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
#: First weights that leave the frozen ones as they are; others change both.
_SUPPORTED_INITS: tuple[Any, ...] = (True, False, "gaussian", "eva", "orthogonal")


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What counts in an `adapter_config.json`."""

    peft_type: str
    r: int
    lora_alpha: float = 8
    use_rslora: bool = False
    target_parameters: list[str] | None = None
    """Tables of experts, which are no modules."""

    @property
    def scale(self) -> float:
        """What the low-rank part is multiplied by."""
        return self.lora_alpha / (sqrt(self.r) if self.use_rslora else self.r)


def build_peft_config(base_model: str, layout: LoraLayout) -> dict[str, Any]:
    """The `adapter_config.json` of an adapter: exactly its modules, by their full names."""
    pairs = list(layout.pairs(torch.empty(layout.size, device="meta")))
    modules = [pair.path for pair in pairs if pair.down.ndim == 2]
    parameters = [pair.path for pair in pairs if pair.down.ndim == 3]
    if parameters:
        is_taken = {path: path.rpartition(".")[2] in _EXPERT_MODULE_NAMES for path in modules}
        parameters += [f"{path}.weight" for path in modules if is_taken[path]]
        modules = [path for path in modules if not is_taken[path]]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": layout.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": modules,
    }
    return config | ({"target_parameters": parameters} if parameters else {})


def read_peft_config(directory: Path) -> PeftConfig:
    """Read what PEFT wrote; InvalidInput if it is more than plain low-rank pairs."""
    path = directory / CONFIG_NAME
    fields = read_struct(path, dict[str, Any])
    try:
        config = msgspec.convert(fields, preload_type(PeftConfig))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{short_path(path)} cannot be read: {error}") from None
    if config.peft_type != "LORA" or config.r < 1:
        raise InvalidInput(
            f"the adapter's peft_type is {config.peft_type!r} of rank {config.r}; expected a LORA"
        )
    plain = dict.fromkeys(_UNSUPPORTED_OPTIONS, _UNSET_VALUES) | {
        "init_lora_weights": _SUPPORTED_INITS
    }
    for name, usual in plain.items():
        if (value := fields.get(name, usual[0])) not in usual:
            raise InvalidInput(
                f"the adapter was trained with {name} {value!r}; only plain low-rank pairs can be "
                "used"
            )
    return config


def tensor_prefixes(paths: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """The names of each module's tensors without their ends; `tables` are parameters, in order.

    PEFT wraps a module once for each of its tables, so the last one's wrapper is the outermost.
    """
    named = {path: f"{PEFT_PREFIX}{path}" for path in paths}
    by_module: dict[str, list[str]] = defaultdict(list)
    for table in parameters:
        by_module[table.rpartition(".")[0]].append(table)
    for module, members in by_module.items():
        for depth, table in enumerate(reversed(members)):
            named[table] = f"{PEFT_PREFIX}{module}{'.base_layer' * depth}"
    return named


def peft_tensors(layout: LoraLayout, flat: Tensor) -> list[NamedTensor]:
    """An adapter's pairs as PEFT names and shapes them, as views of a buffer."""
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
    """Whether a tensor is of an adapter; PEFT may keep copies of frozen embeddings beside it."""
    return _LORA_MARK in name


def module_path(name: str) -> str:
    """The module of a tensor; of a table, the module that has it."""
    return name.removeprefix(PEFT_PREFIX).partition(_LORA_MARK)[0].replace(".base_layer", "")


def check_rank(config: PeftConfig, rank: int) -> None:
    """Refuse another rank."""
    if config.r != rank:
        raise InvalidInput(
            f"the checkpoint was saved with rank {config.r}, but the adapter has {rank}; create "
            f"one with rank {config.r} to load it"
        )


def rescale(ups: Sequence[Tensor], config: PeftConfig) -> None:
    """Make weights that were trained with another scale do the same with ours, in place."""
    factor = config.scale * config.r / LORA_ALPHA
    if factor != 1.0:
        for up in ups:
            up.mul_(factor)
