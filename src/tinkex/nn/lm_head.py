"""The last map of a hosted model: from hidden states to logits over the vocabulary.

Shape letters: M rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import LoraRows
from tinkex.nn.ops.packed_matmul import PackedWeight, can_pack

#: Where oneDNN multiplies a plain float32 matrix faster than MKL does, measured: 1.2 to 2 times.
_FEW_ROWS = range(2, 129)
_LARGE_WEIGHT = 1 << 20


class LMHead:
    """The frozen output map, with what a model does to its logits afterwards."""

    def __init__(self, target_index: int, linear: nn.Linear, config: Any) -> None:
        self.target_index = target_index
        self.weight_VD = linear.weight.detach()
        """The frozen weight, in the memory where it is; it may be an embedding's too."""
        self._bias_V = None if linear.bias is None else linear.bias.detach()
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self._multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._packed_weight: PackedWeight | None = None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self.weight_VD.shape[0]

    @property
    def num_bytes(self) -> int:
        """How much memory the frozen weight takes, and a copy of it again."""
        return self.weight_VD.nbytes

    @property
    def has_packed_copy(self) -> bool:
        """Whether there is a second copy of the weight."""
        return self._packed_weight is not None

    def make_packed_copy(self) -> None:
        """Keep a second copy of the weight for our own kernels, where they run."""
        if can_pack(self.weight_VD):
            self._packed_weight = PackedWeight(self.weight_VD.t())

    def logits(
        self, hidden_MD: Tensor, lora: LoraRows, out_MV: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The logits of rows, and what `pull` needs of the low-rank part.

        They are written to `out_MV`, or a new tensor without it.
        """
        logits_MV = self._base_logits(hidden_MD, out_MV)
        kept = lora.add(self.target_index, hidden_MD, logits_MV)
        if self._multiplier != 1.0:
            logits_MV.mul_(self._multiplier)
        if self.softcap is not None:
            logits_MV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_MV, kept

    def backward(
        self,
        hidden_MD: Tensor,
        dlogits_MV: Tensor,
        logits_MV: Tensor | None,
        saved: Any,
        lora: LoraRows,
    ) -> Tensor:
        """The gradient of the hidden states; adapters of the head gather theirs.

        `dlogits_MV` and `logits_MV` are used up; the logits matter only if there is a softcap.
        """
        if self.softcap is not None:
            assert logits_MV is not None
            # tanh' = 1 - tanh^2, and tanh is the logits by the softcap.
            slope_MV = logits_MV.div_(self.softcap).square_().neg_().add_(1.0)
            dlogits_MV.mul_(slope_MV)
        if self._multiplier != 1.0:
            dlogits_MV.mul_(self._multiplier)
        dhidden_MD = dlogits_MV @ self.weight_VD
        lora.backward(self.target_index, hidden_MD, dlogits_MV, saved, dhidden_MD)
        return dhidden_MD

    def _base_logits(self, hidden_MD: Tensor, out_MV: Tensor | None) -> Tensor:
        if self._packed_weight is not None:
            return self._packed_weight.matmul(hidden_MD, self._bias_V, out_MV)
        if out_MV is None and self._can_use_onednn(hidden_MD):
            onednn = torch.ops.mkldnn._linear_pointwise
            few_MV: Tensor = onednn(hidden_MD, self.weight_VD, self._bias_V, "none", [], "")
            return few_MV
        if self._bias_V is None:
            return torch.mm(hidden_MD, self.weight_VD.t(), out=out_MV)
        return torch.addmm(self._bias_V, hidden_MD, self.weight_VD.t(), out=out_MV)

    def _can_use_onednn(self, hidden_MD: Tensor) -> bool:
        return (
            len(hidden_MD) in _FEW_ROWS
            and self.weight_VD.numel() >= _LARGE_WEIGHT
            and hidden_MD.dtype == torch.float32
            and hidden_MD.device.type == "cpu"
            and torch.backends.mkldnn.is_available()
        )


def find_lm_head(model: nn.Module) -> nn.Linear:
    """A model's output map, which has to be linear."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the output map is a {type(head).__name__}, expected a linear one")
    assert isinstance(head.weight, torch.Tensor)
    return head
