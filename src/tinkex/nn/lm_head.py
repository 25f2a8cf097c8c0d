"""LM head of a hosted model: from hidden states to logits over the vocabulary.

Shape letters: M rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import LoraRows, SavedLora
from tinkex.nn.ops.packed_matmul import PackedWeight, can_pack

#: Row counts and weight size for which oneDNN measured 1.2 to 2 times as fast as MKL.
_FEW_ROWS = range(2, 129)
_LARGE_WEIGHT = 1 << 20


class LMHead:
    """The frozen output layer with LoRA, logit scaling and softcap."""

    def __init__(self, target_index: int, linear: nn.Linear, config: object) -> None:
        self.target_index = target_index
        self.weight_VD = linear.weight.detach()
        """The frozen weight, not copied; it may be tied to the embedding."""
        self._bias_V = None if linear.bias is None else linear.bias.detach()
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self._multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._packed_weight: PackedWeight | None = None

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.weight_VD.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the frozen weight, and of a second copy of it."""
        return self.weight_VD.nbytes

    @property
    def has_packed_copy(self) -> bool:
        """Whether a second copy of the weight exists."""
        return self._packed_weight is not None

    def make_packed_copy(self) -> None:
        """Make a second copy of the weight for the C kernels, if they are available."""
        if can_pack(self.weight_VD):
            self._packed_weight = PackedWeight(self.weight_VD.t())

    def logits(
        self, hidden_MD: Tensor, lora: LoraRows, out_MV: Tensor | None = None
    ) -> tuple[Tensor, SavedLora]:
        """Return the logits, in `out_MV` or a new tensor, and what `backward` needs for LoRA."""
        logits_MV = self._base_logits(hidden_MD, out_MV)
        saved = lora.add(self.target_index, hidden_MD, logits_MV)
        if self._multiplier != 1.0:
            logits_MV.mul_(self._multiplier)
        if self.softcap is not None:
            logits_MV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_MV, saved

    def backward(
        self,
        hidden_MD: Tensor,
        dlogits_MV: Tensor,
        logits_MV: Tensor | None,
        saved: SavedLora,
        lora: LoraRows,
    ) -> Tensor:
        """Return the hidden states' gradient and accumulate the gradients of the head's adapters.

        Overwrites `dlogits_MV` and `logits_MV`; the logits are needed only with a softcap.
        """
        if self.softcap is not None:
            assert logits_MV is not None
            # tanh' = 1 - tanh^2, and tanh = logits / softcap.
            dtanh_MV = logits_MV.div_(self.softcap).square_().neg_().add_(1.0)
            dlogits_MV.mul_(dtanh_MV)
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
    """Return a model's output layer; raises TypeError if it is not linear."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the output layer is a {type(head).__name__}, expected nn.Linear")
    assert isinstance(head.weight, torch.Tensor)
    return head
