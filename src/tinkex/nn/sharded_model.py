"""A hosted model whose layers are divided among ranks with FSDP2.

Each rank stores a part of every layer. A layer's weights are gathered before it runs and released
after it. So every forward and backward pass is collective: all ranks run it, each on its own rows.
Embedding and LM head are not divided.

Shape letters: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_training import SegmentedLora
from tinkex.nn.packed_attention import PackedAttention


class ShardedModel(HostedModel):
    """A hosted model that is divided among the ranks of a mesh.

    `announce` is called before a pass that this rank alone decides on, so that the others take
    part. `on_failure` is called if a pass fails: the ranks no longer agree on what comes next.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        *,
        announce: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        # The checks run before the model is divided, without the other ranks.
        self._announce: Callable[[], None] = lambda: None
        self._on_failure: Callable[[Exception], None] = lambda _: None
        super().__init__(model, shardable=True)
        self._announce, self._on_failure = announce, on_failure
        device = torch.device(mesh.device_type)
        for layer in self._layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # What is left: embedding, LM head, the last norm.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != device.type:
                tensor.data = tensor.data.to(device)
        self.lora_targets.pop()
        self.lm_head = self._wrap_lm_head()

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must run every pass."""
        return True

    def hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        context: ForwardContext,
        *,
        checkpoint_activations: bool = False,
        is_announced: bool = False,
    ) -> Tensor:
        """Return the last hidden states of packed rows, (T, D).

        `is_announced` means that the other ranks run their pass without being asked.
        """
        if not is_announced:
            self._announce()
        try:
            return super().hidden_states(
                tokens_T, positions_T, context, checkpoint_activations=checkpoint_activations
            )
        except Exception as error:
            self._on_failure(error)
            raise

    @torch.no_grad()
    def take_part(self) -> None:
        """Run a pass of one row, because another rank runs one."""
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        context = ForwardContext(SegmentedLora([]), PackedAttention([1]))
        self.hidden_states(zero, zero, context, is_announced=True)

    def local_fraction(self) -> float:
        """The part of the layers' weights that this rank stores."""
        params = [param for layer in self._layers for param in layer.parameters()]
        local = sum(param.to_local().numel() for param in params)  # type: ignore[attr-defined]
        return local / sum(param.numel() for param in params)
