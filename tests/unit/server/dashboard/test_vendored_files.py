from __future__ import annotations

import hashlib
import json
from importlib import resources

VENDOR = resources.files("tinkex.server.dashboard") / "static" / "vendor"


def test_vendored_files_match_their_digests() -> None:
    record = json.loads((VENDOR / "uplot.json").read_text())

    assert record["license"] == "MIT"
    assert record["version"] in (VENDOR / "uPlot.iife.min.js").read_text()[:400]
    assert {
        name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name in record["sha256"]
    } == record["sha256"]
    assert {entry.name for entry in VENDOR.iterdir()} == {"uplot.json", *record["sha256"]}
