"""Outcomes of the matrix: how they are read from a run and kept between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.compat.environments import FOLDER

PASS, FAIL, ABSENT = "pass", "fail", "absent"
#: The SDK itself fails, whatever the server answers.
DEFECT = "defect"


@dataclass(frozen=True)
class Outcome:
    """What one scenario or recipe came to."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    group: str = ""
    title: str = ""


def keep(
    column: str, outcomes: Sequence[Outcome], folder: Path = FOLDER, *, is_part: bool = False
) -> None:
    """Store the outcomes of a column; those of a part replace only their own."""
    path = folder / "results" / f"{column}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {each.name: each for each in kept(column, folder)} if is_part else {}
    known |= {each.name: each for each in outcomes}
    path.write_text(json.dumps([asdict(each) for each in known.values()], indent=1) + "\n")


def kept(column: str, folder: Path = FOLDER) -> list[Outcome]:
    """The outcomes of a column as of its last run; empty if it never ran."""
    path = folder / "results" / f"{column}.json"
    return [Outcome(**each) for each in json.loads(path.read_text())] if path.exists() else []
