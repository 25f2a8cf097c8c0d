"""The one-file weights of all stages under their old names in OUT_DIR."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from tinkex.ids import new_id
from tinkex.pipeline.run.stage_specs import STAGE_ORDER, StageSpec
from tinkex.pipeline.trainer_lock import lock_directory
from tinkex.system.atomic import SCRATCH_PREFIX, remove_directory, remove_scratch


def legacy_files(stage: StageSpec, out_dir: Path) -> list[Path]:
    """The .pth files that a stage has written."""
    return (
        sorted(stage.directory(out_dir).glob(f"{stage.legacy_prefix}_*.pth"))
        if stage.legacy_prefix
        else []
    )


def link_legacy(stage: StageSpec, out_dir: Path) -> list[Path]:
    """Make each of them reachable in OUT_DIR itself; returns the names there."""
    return [_link(target, out_dir / target.name) for target in legacy_files(stage, out_dir)]


def _link(target: Path, link: Path) -> Path:
    # Seen from the link's own directory: it then holds wherever OUT_DIR is moved to.
    inside = os.path.relpath(target, link.parent)
    scratch = link.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    try:
        try:
            scratch.symlink_to(inside)
        except OSError:
            shutil.copyfile(target, scratch)
        scratch.replace(link)
    finally:
        scratch.unlink(missing_ok=True)
    return link


def remove_dangling_links(out_dir: Path) -> None:
    """Take away links whose stage is gone."""
    for stage in STAGE_ORDER:
        names = out_dir.glob(f"{stage.legacy_prefix}_*.pth") if stage.legacy_prefix else ()
        for link in names:
            if link.is_symlink() and not link.exists():
                link.unlink()


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
