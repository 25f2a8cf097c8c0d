"""Files of the stages in OUT_DIR: links to single-file weights, and removal of stages."""

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
    """Return the .pth files of a stage."""
    return (
        sorted(stage.directory(out_dir).glob(f"{stage.legacy_prefix}_*.pth"))
        if stage.legacy_prefix
        else []
    )


def link_legacy(stage: StageSpec, out_dir: Path) -> list[Path]:
    """Link the .pth files of a stage into OUT_DIR; returns the links."""
    return [_link(target, out_dir / target.name) for target in legacy_files(stage, out_dir)]


def _link(target: Path, link: Path) -> Path:
    # Relative, so that the link stays valid when OUT_DIR is moved.
    relative = os.path.relpath(target, link.parent)
    scratch = link.with_name(f"{SCRATCH_PREFIX}{new_id()}")
    try:
        try:
            scratch.symlink_to(relative)
        except OSError:
            shutil.copyfile(target, scratch)
        scratch.replace(link)
    finally:
        scratch.unlink(missing_ok=True)
    return link


def remove_dangling_links(out_dir: Path) -> None:
    """Remove links to stages that no longer exist."""
    for stage in STAGE_ORDER:
        names = out_dir.glob(f"{stage.legacy_prefix}_*.pth") if stage.legacy_prefix else ()
        for link in names:
            if link.is_symlink() and not link.exists():
                link.unlink()


def existing_stages(stages: Iterable[StageSpec], out_dir: Path) -> list[StageSpec]:
    """Return the stages that exist on disk."""
    return [stage for stage in stages if stage.directory(out_dir).is_dir()]


def remove_stages(stages: Iterable[StageSpec], out_dir: Path) -> list[str]:
    """Delete the output of stages, the last first; returns their names."""
    removed = []
    # Children first: if interrupted, no stage is left without its parent.
    for stage in reversed(list(stages)):
        if stage.directory(out_dir).is_dir():
            # A trainer that was started separately may be using the directory.
            with lock_directory(stage.directory(out_dir)):
                remove_directory(stage.directory(out_dir))
            removed.append(stage.name)
    remove_dangling_links(out_dir)
    # Leftovers of an interrupted removal.
    remove_scratch(out_dir)
    return removed[::-1]
