"""Layers that keep their input alone and compute the rest again on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinkex.nn.running import activate, active_forward


def enable_activation_checkpointing(layer: nn.Module) -> None:
    """Let a layer obey a pass that saves memory."""
    layer.forward = _CheckpointedForward(layer.forward)


class _CheckpointedForward:
    """A layer's `forward`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = active_forward()
        if not run.checkpoint_activations or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)

        def again(*args: Any) -> Any:
            # The way back runs when the pass is long over.
            with activate(run.context):
                return self._forward(*args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False)
