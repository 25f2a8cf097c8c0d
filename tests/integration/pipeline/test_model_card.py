from __future__ import annotations

import re

from tinkex.pipeline.tiny.package import ModelCardMetrics, make_card
from tinkex.pipeline.tiny.tasks import FAMILIES


def test_model_card_contains_the_metrics() -> None:
    figures = ModelCardMetrics(
        num_parameters=2_340_000,
        vocab_size=1536,
        context=2048,
        num_steps=1234,
        num_tasks=dict.fromkeys(FAMILIES, 40),
        shares=dict.fromkeys(FAMILIES, 0.5) | {"add": 0.975},
    )
    card = make_card(figures)
    assert "2.3 million" in card and "1,234 updates" in card
    assert card.count("| 40 | 50 % |") == len(FAMILIES) - 1
    assert re.search(r"^\| add \| .* \| 40 \| 98 % \|$", card, re.MULTILINE)
