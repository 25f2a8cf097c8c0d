"""Base models that are divided among the ranks, for models that do not fit one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from tinkex.nn.ranks import DistributedContext

if TYPE_CHECKING:
    from tinkex.engine.models.loading import HostModel


def make_host(
    ranks: DistributedContext,
    device: torch.device,
    announce: Callable[[str], None],
    on_failure: Callable[[Exception], None],
) -> HostModel:
    """Return a function that hosts a base model on all ranks; see `ShardedModel`."""
    mesh = init_device_mesh(device.type, (ranks.world_size,))

    def host(name: str, model: PreTrainedModel) -> ShardedModel:
        return ShardedModel(model, mesh, announce=partial(announce, name), on_failure=on_failure)

    # Imports the model classes of transformers, which takes seconds: not before they are needed.
    from tinkex.nn.sharded_model import ShardedModel  # noqa: PLC0415

    return host
