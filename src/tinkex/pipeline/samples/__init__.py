"""Data of our own for every stage: small, made from a seed, and enough to see a stage work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tinkex.checkpoint.atomic import write_file_atomic
from tinkex.errors import InvalidInput
from tinkex.pipeline.samples.rows import ROW_MAKERS

#: Rows of each stage's file, unless told otherwise.
SAMPLE_SIZES: Mapping[str, int] = {"pretrain": 2000, "sft": 1500, "dpo": 600, "r1": 800}
#: So many repetitions in a row mean that there is nothing new to say.
_MAX_REPEATS = 2000


def write_sample_files(
    directory: Path, seed: int = 1337, sizes: Mapping[str, int] = SAMPLE_SIZES
) -> dict[str, Path]:
    """Write `<stage>.jsonl` for each stage named in `sizes`; the same seed gives the same bytes.

    No row comes twice, so that what is held out is not seen in training.
    """
    written = {}
    for stage, num_rows in sizes.items():
        if stage not in ROW_MAKERS:
            raise InvalidInput(
                f"there is no stage {stage!r}; expected one of {', '.join(ROW_MAKERS)}"
            )
        lines = list(islice(_distinct_lines(stage, seed), num_rows))
        if len(lines) < num_rows:
            raise InvalidInput(f"{stage} has {len(lines)} different rows, fewer than {num_rows}")
        written[stage] = directory / f"{stage}.jsonl"
        write_file_atomic(written[stage], "".join(lines).encode(), mode=0o644)
    return written


def _distinct_lines(stage: str, seed: int) -> Iterator[str]:
    # A text as a seed gives the same dice in every process; a hash of it would not.
    dice = Random(f"{stage} {seed}")
    seen: set[str] = set()
    num_repeats = 0
    while num_repeats < _MAX_REPEATS:
        line = _encode_line(ROW_MAKERS[stage](dice))
        if line in seen:
            num_repeats += 1
            continue
        num_repeats = 0
        seen.add(line)
        yield line


def _encode_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
