"""Composable regularizers for custom losses.

    loss_fn = with_regularizers(my_loss, [KLDivergence(weight=0.1), Entropy(weight=0.01)])
    training.forward_backward_custom(data, loss_fn)

Importing this package does not import torch.
"""

from tinkex.regularizers.base import LossBatch, Regularizer
from tinkex.regularizers.between_datums import Consistency, GradientPenalty, Orthogonality
from tinkex.regularizers.combined import with_regularizers
from tinkex.regularizers.elementwise import L1, L2, ElasticNet, Entropy, KLDivergence
from tinkex.regularizers.regularizer_files import (
    load_regularizers,
    parse_regularizers,
    regularizer_to_dict,
)

__all__ = [
    "L1",
    "L2",
    "Consistency",
    "ElasticNet",
    "Entropy",
    "GradientPenalty",
    "KLDivergence",
    "LossBatch",
    "Orthogonality",
    "Regularizer",
    "load_regularizers",
    "parse_regularizers",
    "regularizer_to_dict",
    "with_regularizers",
]
