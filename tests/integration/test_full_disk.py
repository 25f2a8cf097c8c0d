"""A full disk gives a clear error and leaves no incomplete file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.small_disk import run_on_small_disk

PROGRAM = "from tests.integration.full_disk_writers import main; main()"


def test_every_writer_reports_full_disk(tmp_path: Path) -> None:
    done = run_on_small_disk(tmp_path / "disk", PROGRAM, size="8m")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert len(table) == 9
    for writer, counts in table.items():
        assert counts["full"] > 3, writer
        assert counts["done"] >= 2, writer
