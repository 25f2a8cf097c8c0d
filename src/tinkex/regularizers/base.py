"""The interface of a regularizer, and the batch that it is a function of."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from tinkex.client.loss_graph import load_torch
from tinkex.errors import InvalidInput
from tinkex.types import Datum
from tinkex.types.optimizers import check_range

if TYPE_CHECKING:
    import torch

Reduction = Literal["mean", "sum"]
#: The first of these inputs that a datum has selects its targets: those with a nonzero value.
SELECTING_INPUTS = ("weights", "mask", "advantages")
_NAME = re.compile(r"[a-z0-9_.-]{1,64}")


class LossBatch:
    """A batch as regularizers see it: the selected targets of all datums, concatenated."""

    def __init__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor], base_loss: torch.Tensor
    ) -> None:
        self.data = data
        self.all_logprobs = logprobs
        """Log-probabilities of all targets, per datum."""
        self.base_loss = base_loss

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        """Which targets of each datum are selected."""
        torch = load_torch()
        masks = []
        for datum, scores in zip(self.data, self.all_logprobs, strict=True):
            key = next((key for key in SELECTING_INPUTS if key in datum.loss_fn_inputs), None)
            if key is None:
                masks.append(torch.ones(scores.shape, dtype=torch.bool))
            else:
                values = datum.loss_fn_inputs[key].to_torch()
                masks.append((values != 0).reshape(scores.shape))
        return masks

    @cached_property
    def selected(self) -> list[torch.Tensor]:
        """Log-probabilities of the selected targets, one vector per datum."""
        pairs = zip(self.all_logprobs, self.masks, strict=True)
        return [scores[mask] for scores, mask in pairs]

    @cached_property
    def logprobs(self) -> torch.Tensor:
        """Log-probabilities of the selected targets of all datums as one vector."""
        result: torch.Tensor = load_torch().cat(self.selected)
        return result

    @cached_property
    def num_positions(self) -> int:
        """Number of token positions with a selected target, at least 1."""
        counts = (int((m.any(-1) if m.ndim > 1 else m).sum()) for m in self.masks)
        return max(1, sum(counts))

    def read_input(self, key: str) -> list[torch.Tensor]:
        """Return an input of the datums at the selected targets, one vector per datum."""
        values = []
        for index, (datum, mask) in enumerate(zip(self.data, self.masks, strict=True)):
            tensor = datum.loss_fn_inputs.get(key)
            if tensor is None:
                raise InvalidInput(
                    f"data[{index}] has no {key!r} in its loss_fn_inputs; a regularizer requires it"
                )
            dense = tensor.to_torch()
            if dense.numel() != mask.numel():
                raise InvalidInput(
                    f"data[{index}] has {key!r} of shape {tensor.shape}; a regularizer requires "
                    f"the shape of its target_tokens, {list(mask.shape)}"
                )
            values.append(dense.reshape(mask.shape)[mask].to(load_torch().float32))
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularizer(ABC):
    """A term that is added to a custom loss: weight times penalty."""

    kind: ClassVar[str] = ""

    weight: float
    """Factor of the penalty; at least 0."""
    name: str | None = None
    """Name in the metrics; default: the kind. Two regularizers of one kind need names."""

    def __post_init__(self) -> None:
        check_range("weight", self.weight, at_least=0.0)
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise InvalidInput(
                f"the name of a regularizer is {self.name!r}; expected at most 64 lowercase "
                "letters, digits, '_', '-' and '.'"
            )

    @property
    def label(self) -> str:
        """The name in the metrics."""
        return self.name or self.kind

    @property
    def reference_input(self) -> str | None:
        """The input that has reference log-probabilities, if the penalty needs them."""
        return None

    @abstractmethod
    def penalty(self, batch: LossBatch) -> torch.Tensor:
        """Compute the penalty, a scalar tensor with a gradient."""


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise InvalidInput(f"{name} is {value!r}; expected one of {', '.join(choices)}")
