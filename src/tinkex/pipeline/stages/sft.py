"""Supervised fine-tuning: what the assistant says is learned, the rest is only read."""

from __future__ import annotations

from tinkex.pipeline.stages.pretrain import PretrainStage


class SftStage(PretrainStage):
    """Learns the assistant's tokens, the end of each turn included.

    A conversation that is too long loses its end: an answer without its question teaches nothing.
    """

    name = "sft"
    split_long = False
