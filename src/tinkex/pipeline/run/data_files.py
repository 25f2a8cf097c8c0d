"""Choose the data file of each stage; without one, small sample data is generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.data import sample_rows
from tinkex.data.jsonl import JsonlLine, parse_line, read_lines
from tinkex.data.rows import STAGE_PARSERS
from tinkex.errors import InvalidInput
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.stage_specs import StageSpec

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
        sample_rows.write_sample_files(config.out_dir / SAMPLES_DIR, config.seed, missing)
    return bool(missing)


def check_rows(stage: str, path: Path, limit: int = 0) -> int:
    """Parse every row like the trainer does; returns the number of rows."""
    return sum(1 for line in read_lines(path, limit) if _check_row(stage, path, line))


def _check_row(stage: str, path: Path, line: JsonlLine) -> bool:
    parse_line(path, line, STAGE_PARSERS[stage])
    return True
