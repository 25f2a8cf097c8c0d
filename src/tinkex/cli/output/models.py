"""Models of a server as they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinkex.cli.format import format_bool, format_optional
from tinkex.cli.output.base import Column, Output, list_title

if TYPE_CHECKING:
    from tinkex.types import SupportedModel


class ModelList(Output):
    """The base models that a server offers."""

    def __init__(self, models: Sequence[SupportedModel], total: int) -> None:
        self._models = models
        self._total = total

    def to_dict(self) -> dict[str, Any]:
        """The official shape, and how many there are."""
        models = [model.model_dump() for model in self._models]
        return {"models": models, "total": self._total, "shown": len(models)}

    def columns(self) -> Sequence[Column]:
        """What a model can be used for."""
        names = (Column("Model"), Column("Max Context", 1, is_number=True))
        return (*names, Column("Trainable", 2), Column("Sampleable", 2))

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per model."""
        return [
            [
                format_optional(model.model_name),
                format_optional(model.max_context_length, lambda count: f"{count:,}"),
                format_optional(model.trainable, format_bool),
                format_optional(model.sampleable, format_bool),
            ]
            for model in self._models
        ]

    def title(self) -> str:
        """How many there are."""
        return list_title(len(self._models), 0, "model")
