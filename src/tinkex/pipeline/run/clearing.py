"""Throwing stages away: each is gone at once under its name, then its files are removed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tinkex.checkpoint.atomic import remove_directory, remove_scratch
from tinkex.pipeline.holding import lock_directory
from tinkex.pipeline.run.links import remove_dangling_links
from tinkex.pipeline.run.stages import StageSpec


def existing_stages(stages: Iterable[StageSpec], out_dir: Path) -> list[StageSpec]:
    """Those of the stages that have anything on disk."""
    return [stage for stage in stages if stage.directory(out_dir).is_dir()]


def remove_stages(stages: Iterable[StageSpec], out_dir: Path) -> list[str]:
    """Remove all that the stages have made, the last first; returns their names."""
    gone = []
    # A child without its parent would be kept as it is; a parent without its child is only early.
    for stage in reversed(list(stages)):
        if stage.directory(out_dir).is_dir():
            # Not under the hands of a trainer that somebody started by itself.
            with lock_directory(stage.directory(out_dir)):
                remove_directory(stage.directory(out_dir))
            gone.append(stage.name)
    remove_dangling_links(out_dir)
    # What an earlier clearing had put aside when it was stopped.
    remove_scratch(out_dir)
    return gone[::-1]
