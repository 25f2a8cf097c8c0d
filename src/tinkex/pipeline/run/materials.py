"""The data of the stages: the files that are named or found, else small generated ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.data.jsonl import JsonlLine, parse_line, read_lines
from tinkex.errors import InvalidInput
from tinkex.pipeline import samples
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.stages import Stage
from tinkex.pipeline.schemas import PARSERS

#: Below OUT_DIR: what is generated when there is no data file.
SAMPLES_DIR = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A stage's data file."""

    path: Path
    is_generated: bool = False
    """Whether it is one of our own small files."""


def choose(stages: Iterable[Stage], config: PipelineConfig) -> dict[str, Material]:
    """The data file of each stage that has data, by name; a file that is named must be there."""
    return {stage.name: _choose(stage, config) for stage in stages if stage.defaults}


def _choose(stage: Stage, config: PipelineConfig) -> Material:
    named = config.data_file(stage.name)
    if named is not None:
        if not named.is_file():
            raise InvalidInput(
                f"{named} is no file; {stage.name.upper()}_JSON names it",
                hint="Correct the variable, or unset it to train on small generated data.",
            )
        return Material(path=named)
    for default in stage.defaults:
        if (path := config.data_root / default).is_file():
            return Material(path=path)
    return Material(path=config.out_dir / SAMPLES_DIR / f"{stage.name}.jsonl", is_generated=True)


def write_missing(chosen: Mapping[str, Material], config: PipelineConfig) -> bool:
    """Generate the small files if any stage needs one that is not there; True if it did."""
    missing = {
        stage: samples.SIZES[stage]
        for stage, one in chosen.items()
        if one.is_generated and not one.path.is_file()
    }
    if missing:
        samples.write(config.out_dir / SAMPLES_DIR, config.seed, missing)
    return bool(missing)


def check(stage: str, path: Path, limit: int = 0) -> int:
    """Read every row as the trainer will; the first that is wrong is told by file and line."""
    return sum(1 for line in read_lines(path, limit) if _row(stage, path, line))


def _row(stage: str, path: Path, line: JsonlLine) -> bool:
    parse_line(path, line, PARSERS[stage])
    return True
