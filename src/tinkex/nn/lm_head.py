"""LM head of a hosted model, from hidden states to logits over the vocabulary; its embedding.

Shape letters: M rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tinkex.nn.forward_context import LoraRows, SavedLora
from tinkex.nn.ops.packed_matmul import PackedWeight, can_pack, narrow_dtype

if TYPE_CHECKING:
    # Imports the model classes of transformers, which takes a second.
    from transformers import PreTrainedModel

#: Row counts and weight size for which oneDNN measured 1.2 to 2 times as fast as MKL.
_FEW_ROWS = range(2, 129)
_LARGE_WEIGHT = 1 << 20


class LMHead:
    """The frozen output layer with LoRA, logit scaling and softcap."""

    def __init__(
        self,
        target_index: int,
        linear: nn.Linear,
        config: object,
        packed_weight: PackedWeight | None = None,
    ) -> None:
        """`packed_weight` takes the place of the linear layer's own weight."""
        self.target_index = target_index
        self.vocab_size = linear.out_features
        self.dtype = linear.weight.dtype
        self.device = linear.weight.device if packed_weight is None else torch.device("cpu")
        self._packed_weight = packed_weight
        self._weight_VD = None if packed_weight is not None else linear.weight.detach()
        self._bias_V = None if linear.bias is None else linear.bias.detach()
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self._multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)

    @property
    def weight_VD(self) -> Tensor:
        """The frozen weight, which may be tied to the embedding; a copy if it is packed."""
        if self._weight_VD is not None:
            return self._weight_VD
        assert self._packed_weight is not None
        return self._packed_weight.weight_KN().t()

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight; another weight belongs to the model."""
        return 0 if self._packed_weight is None else self._packed_weight.num_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a packed copy of the weight, at most; 0 if it would not be used."""
        can_copy = self._packed_weight is None and can_pack(self.weight_VD)
        return self.weight_VD.nbytes if can_copy else 0

    def make_copy(self) -> None:
        """Make a packed copy of a weight that must also stay as it is."""
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
        if self._packed_weight is not None:
            dhidden_MD = self._packed_weight.matmul_transposed(dlogits_MV)
        else:
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


class FrozenEmbedding(nn.Module):
    """Token embeddings that are widened from the type in which they are stored.

    The table is the packed weight of a tied LM head, or a tensor of 16-bit numbers.
    """

    def __init__(self, table: PackedWeight | Tensor) -> None:
        super().__init__()
        self._packed_weight = table if isinstance(table, PackedWeight) else None
        self._table_VD: Tensor | None
        self.register_buffer("_table_VD", table if isinstance(table, Tensor) else None)
        self.num_embeddings = len(table) if isinstance(table, Tensor) else table.num_outputs

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens of any shape, in float32."""
        if self._packed_weight is None:
            assert self._table_VD is not None
            return nn.functional.embedding(tokens, self._table_VD).float()
        rows_MD = self._packed_weight.columns(tokens.reshape(-1))
        return rows_MD.view(*tokens.shape, -1)


def pack_lm_head(model: PreTrainedModel, linear: nn.Linear) -> PackedWeight | None:
    """Pack the weight of a model's LM head and free the original, if nothing else needs it.

    A plain embedding is replaced by one that reads the same packed weight, or has a smaller type.
    Returns None if the weight stays as it is.
    """
    embedding: nn.Module = model.get_input_embeddings()
    weight_VD = linear.weight.detach()
    is_tied = embedding.weight is linear.weight
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if not can_pack(weight_VD) or (is_tied and not is_plain):
        return None
    packed_weight = PackedWeight(weight_VD.t())
    if is_tied:
        model.set_input_embeddings(FrozenEmbedding(packed_weight))
    elif isinstance(embedding, nn.Embedding) and is_plain:
        table_VD = embedding.weight.detach()
        dtype = narrow_dtype(table_VD)
        if dtype != table_VD.dtype:
            model.set_input_embeddings(FrozenEmbedding(table_VD.to(dtype)))
    linear.weight = nn.Parameter(weight_VD.to("meta"), requires_grad=False)
    return packed_weight


def find_lm_head(model: nn.Module) -> nn.Linear:
    """Return a model's output layer; raises TypeError if it is not linear."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the output layer is a {type(head).__name__}, expected nn.Linear")
    assert isinstance(head.weight, torch.Tensor)
    return head
