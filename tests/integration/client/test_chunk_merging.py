"""Metric reductions that must agree between processes."""

from __future__ import annotations

import subprocess
import sys

from tinkex.client.chunking import reduce_metrics


def reduced(key: str, *values: tuple[float, int]) -> dict[str, float]:
    return reduce_metrics([({key: value}, weight) for value, weight in values])


def test_hash_unordered_is_stable_across_processes() -> None:
    here = reduced("x:hash_unordered", (5.0, 1), (7.0, 1))["x:hash_unordered"]
    assert here == float(hash((5, 7)))
    probe = "print(float(hash((5, 7))))"
    there = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        check=True,
        text=True,
        env={"PYTHONHASHSEED": "12345"},
    )
    assert float(there.stdout) == here
