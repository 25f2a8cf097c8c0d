"""The compatibility page: the same outcomes always give the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.page import by_name, page, quoted, with_section
from tests.compat.results import ABSENT, DEFECT, FAIL, PASS, Outcome, keep, kept

GROUP = "Sampling"


def outcome(name: str, status: str, detail: str = "") -> Outcome:
    return Outcome(name, status, detail, group=GROUP, title=f"`{name}`")


def columns() -> dict[str, dict[str, Outcome]]:
    old = [outcome("sample", PASS), outcome("pickle", ABSENT), outcome("stop", FAIL, "a | b\nc")]
    new = [outcome("sample", PASS), outcome("pickle", DEFECT, "a bug"), outcome("stop", PASS)]
    return {"0.3.0": by_name(old), "0.36.0": by_name(new)}


def test_cells_show_each_status() -> None:
    lines = page(columns()).splitlines()
    assert "| `sample` | yes | yes |" in lines
    assert "| `pickle` |  | SDK |" in lines
    assert "| `stop` | **no** | yes |" in lines


def test_reasons_follow_the_tables() -> None:
    lines = page(columns()).splitlines()
    assert "| `stop` | 0.3.0 | a \\| b c |" in lines
    assert "| `pickle` | 0.36.0 | a bug |" in lines


def test_summary_counts_scenarios_of_each_version() -> None:
    lines = page(columns()).splitlines()
    assert "| 0.3.0 | 2 | 1 |  |" in lines
    assert "| 0.36.0 | 2 | 2 | `pickle` |" in lines


def test_quoted_text_replaces_ids_ports_and_folders() -> None:
    texts = [
        f"tinker://{run}:train:0 at http://127.0.0.1:{port}/x in /tmp/{run[:8]}/plain"
        for run, port in (
            ("29ba6b7e-1596-47f4-aebe-8c6679d43837", 40001),
            ("83995dbc-e51b-476b-8e79-c97f29fee865", 40002),
        )
    ]
    assert quoted(texts[0]) == quoted(texts[1])
    assert quoted(texts[0]) == "tinker://ID:train:0 at http://127.0.0.1:PORT/x in FOLDER"


def test_partial_run_keeps_other_outcomes(tmp_path: Path) -> None:
    keep("0.3.0", [outcome("sample", PASS), outcome("stop", FAIL, "why")], tmp_path)
    keep("0.3.0", [outcome("stop", PASS)], tmp_path, is_part=True)
    found = {each.name: each.status for each in kept("0.3.0", tmp_path)}
    assert found == {"sample": PASS, "stop": PASS}
    assert kept("0.36.0", tmp_path) == []


def test_full_run_removes_outcomes_of_missing_scenarios(tmp_path: Path) -> None:
    keep("0.3.0", [outcome("sample", PASS), outcome("stop", PASS)], tmp_path)
    keep("0.3.0", [outcome("sample", FAIL)], tmp_path)
    assert kept("0.3.0", tmp_path) == [outcome("sample", FAIL)]


def test_section_is_replaced() -> None:
    text = page(columns(), ["## Cookbook\n", "old"])
    assert with_section(text, ["## Cookbook\n", "new"]) == page(columns(), ["## Cookbook\n", "new"])


def test_replacing_a_missing_section_raises() -> None:
    with pytest.raises(ValueError, match="no section '## Cookbook'"):
        with_section(page(columns()), ["## Cookbook\n", "new"])
