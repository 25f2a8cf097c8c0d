"""The data of the stages: the files that are named or found, else small generated ones."""

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

#: Below OUT_DIR: what is generated when there is no data file.
SAMPLES_DIR = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    """A stage's data file."""

    path: Path
    is_generated: bool = False
    """Whether it is one of our own small files."""


def choose_data_files(stages: Iterable[StageSpec], config: PipelineConfig) -> dict[str, StageData]:
    """The data file of each stage that has data, by name; a file that is named must be there."""
    return {stage.name: _choose_data_file(stage, config) for stage in stages if stage.default_files}


def _choose_data_file(stage: StageSpec, config: PipelineConfig) -> StageData:
    named = config.data_file(stage.name)
    if named is not None:
        if not named.is_file():
            raise InvalidInput(
                f"{named} is no file; {stage.name.upper()}_JSON names it",
                hint="Correct the variable, or unset it to train on small generated data.",
            )
        return StageData(path=named)
    for default in stage.default_files:
        if (path := config.data_root / default).is_file():
            return StageData(path=path)
    return StageData(path=config.out_dir / SAMPLES_DIR / f"{stage.name}.jsonl", is_generated=True)


def write_missing_samples(chosen: Mapping[str, StageData], config: PipelineConfig) -> bool:
    """Generate the small files if any stage needs one that is not there; True if it did."""
    missing = {
        stage: sample_rows.SAMPLE_SIZES[stage]
        for stage, one in chosen.items()
        if one.is_generated and not one.path.is_file()
    }
    if missing:
        sample_rows.write_sample_files(config.out_dir / SAMPLES_DIR, config.seed, missing)
    return bool(missing)


def check_rows(stage: str, path: Path, limit: int = 0) -> int:
    """Read every row as the trainer will; the first that is wrong is told by file and line."""
    return sum(1 for line in read_lines(path, limit) if _check_row(stage, path, line))


def _check_row(stage: str, path: Path, line: JsonlLine) -> bool:
    parse_line(path, line, STAGE_PARSERS[stage])
    return True
