"""Proves that a hosted model says what the model said before it was taken in.

Shape letters: T rows, V vocabulary, M rows, K inputs, N outputs, H query heads, G key heads, D head
width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkex.nn.attention import PackedAttention
from tinkex.nn.experts import SITES_OF_EXPERTS
from tinkex.nn.head import Head, find_head
from tinkex.nn.running import Options, Owner, Pass
from tinkex.nn.sites import Site
from tinkex.nn.survey import refusal

LENGTHS = (5, 9)
#: How far a hosted model's log-probabilities may be from the model's own.
_TOLERANCE = 1e-3
#: The same for 16-bit numbers.
_COARSE_TOLERANCE = 0.1
#: What a model's own code raises if it cannot do without what it is not given here.
_FAILURES = (TypeError, AttributeError, ValueError, RuntimeError, LookupError)


class Hosted(Protocol):
    """A model that was taken in."""

    head: Head
    sites: list[Site]

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, this: Pass) -> Tensor:
        """The last hidden states of packed rows, (T, D)."""
        ...


class _Rows:
    """Rows of the base model alone; notes how many came to each site."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[int, int]] = Counter()
        self._routed: list[int] = []

    def have_come_once(self, sites: Sequence[Site], num_rows: int) -> bool:
        """Whether every map and every module of experts was given all rows, once."""
        maps = [number for number, site in enumerate(sites) if not site.num_experts]
        num_modules = (len(sites) - len(maps)) // SITES_OF_EXPERTS
        is_mapped = self._seen == Counter({(number, num_rows): 1 for number in maps})
        return is_mapped and self._routed == [num_rows] * num_modules

    def is_trained(self, site: int) -> bool:
        return False

    def add(self, site: int, x_MK: Tensor, y_MN: Tensor) -> None:
        self._seen[site, x_MK.shape[0]] += 1

    def pull(self, site: int, x_MK: Tensor, dy_MN: Tensor, kept: Any, dx_MK: Tensor | None) -> None:
        raise AssertionError("a trial is not differentiated")

    def owners(self, num_rows: int) -> tuple[npt.NDArray[np.int64], Sequence[Owner]]:
        self._routed.append(num_rows)
        return np.full(num_rows, -1, dtype=np.int64), []


class _Sight:
    """Packed attention that notes how each layer attends."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Options]] = []
        self._attention = PackedAttention(LENGTHS)

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, how: Options
    ) -> Tensor:
        self.seen.append((layer, how))
        return self._attention.attend(layer, q_HTD, k_GTD, v_GTD, how)


class Witness(NamedTuple):
    """What was seen of a model that ran packed."""

    logits_TV: Tensor
    rows: _Rows
    sight: Sequence[tuple[int, Options]]
    """The layers that attended, in order, and how."""


class Trial:
    """A few tokens that a model reads before and after it is taken in."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config: Any = model.get_decoder().config
        head = find_head(model)
        dice = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, head.out_features, (sum(LENGTHS),), generator=dice)
        self._tokens_T = tokens.to(head.weight.device)
        parts = [
            model(input_ids=part.unsqueeze(0), use_cache=False).logits[0]
            for part in self._tokens_T.split(LENGTHS)
        ]
        self._expected_TV = torch.cat(parts).float().log_softmax(-1)

    @torch.no_grad()
    def run(self, hosted: Hosted) -> Witness:
        """Run the model packed, and see what it says and who attends how."""
        device = self._tokens_T.device
        positions_T = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
        rows, sight = _Rows(), _Sight()
        try:
            hidden_TD = hosted.hidden(self._tokens_T, positions_T, Pass(rows, sight))
        except _FAILURES as error:
            raise refusal(self._model, f"packed, it does not run: {error}") from error
        logits_TV, _ = hosted.head.logits(hidden_TD, rows)
        return Witness(logits_TV, rows, sight.seen)

    def check(self, hosted: Hosted) -> dict[int, Options]:
        """Refuse a model that, packed, says something else; returns how each layer attends."""
        found = self.run(hosted)
        self._check_sight(found.sight)
        if not found.rows.have_come_once(hosted.sites, sum(LENGTHS)):
            raise refusal(self._model, "its linear maps are not given every token once")
        is_fine = found.logits_TV.dtype == torch.float32
        off = (found.logits_TV.float().log_softmax(-1) - self._expected_TV).abs().max().item()
        if not off <= (_TOLERANCE if is_fine else _COARSE_TOLERANCE):
            raise refusal(self._model, f"packed, its log-probabilities are off by {off:.2g}")
        return dict(found.sight)

    def _check_sight(self, seen: Sequence[tuple[int, Options]]) -> None:
        """A window is longer than a trial, so that only what was asked for can be looked at."""
        layers = range(self._config.num_hidden_layers)
        if sorted(layer for layer, _ in seen) != list(layers):
            raise refusal(self._model, "not every layer attends once")
        window = getattr(self._config, "sliding_window", None)
        if window is None or window >= self._config.max_position_embeddings:
            return
        kinds = getattr(self._config, "layer_types", None) or ["sliding_attention" for _ in layers]
        for layer, how in seen:
            expected = window if kinds[layer] == "sliding_attention" else None
            if how.window != expected:
                raise refusal(
                    self._model,
                    f"layer {layer} attends with a window of {how.window}, where its config says "
                    f"{expected}",
                )
