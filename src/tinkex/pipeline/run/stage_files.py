"""Files of the stages: their data, links to single-file weights, and removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.data import sample_rows
from tinkex.data.jsonl import JsonlLine, parse_line, read_lines
from tinkex.data.rows import STAGE_PARSERS
from tinkex.errors import InvalidInput
from tinkex.ids import new_id
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.output_locks import lock_directory
from tinkex.pipeline.run.stage_specs import STAGE_ORDER, StageSpec
from tinkex.system.atomic import SCRATCH_PREFIX, remove_directory, remove_scratch

#: Subdirectory of OUT_DIR for generated sample data.
SAMPLES_DIR = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    """A stage's data file."""

    path: Path
    is_generated: bool = False
    """True for generated sample data."""


def choose_data_files(stages: Iterable[StageSpec], config: PipelineConfig) -> dict[str, StageData]:
    """Return the data file of each stage; raises InvalidInput if a configured file is missing."""
    return {stage.name: _choose_data_file(stage, config) for stage in stages if stage.default_files}


def _choose_data_file(stage: StageSpec, config: PipelineConfig) -> StageData:
    named = config.data_file(stage.name)
    if named is not None:
        if not named.is_file():
            raise InvalidInput(
                f"{stage.name.upper()}_JSON: {named} is not a file",
                hint="Correct the variable, or unset it to train on generated sample data.",
            )
        return StageData(path=named)
    for default in stage.default_files:
        if (path := config.data_root / default).is_file():
            return StageData(path=path)
    return StageData(path=config.out_dir / SAMPLES_DIR / f"{stage.name}.jsonl", is_generated=True)


def write_missing_samples(chosen: Mapping[str, StageData], config: PipelineConfig) -> bool:
    """Generate missing sample data; returns True if any was written."""
    missing = {
        stage: sample_rows.SAMPLE_SIZES[stage]
        for stage, data in chosen.items()
        if data.is_generated and not data.path.is_file()
    }
    if missing:
        sample_rows.write_sample_files(
            config.out_dir / SAMPLES_DIR, config.settings().seed, missing
        )
    return bool(missing)


def check_rows(stage: str, path: Path, limit: int = 0) -> int:
    """Parse every row like the trainer does; returns the number of rows."""
    return sum(1 for line in read_lines(path, limit) if _check_row(stage, path, line))


def _check_row(stage: str, path: Path, line: JsonlLine) -> bool:
    parse_line(path, line, STAGE_PARSERS[stage])
    return True


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
