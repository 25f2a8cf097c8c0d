"""A disk that fills up while something is written: one error that says so, and no torn file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.small_disk import run_on_small_disk

PROGRAM = "from tests.integration.full_disk_writers import main; main()"


def test_every_writer_reports_a_full_disk_wherever_it_happens(tmp_path: Path) -> None:
    done = run_on_small_disk(tmp_path / "disk", PROGRAM, size="8m")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert len(table) == 9
    for writer, counts in table.items():
        assert counts["full"] > 3, writer
        assert counts["done"] >= 2, writer
