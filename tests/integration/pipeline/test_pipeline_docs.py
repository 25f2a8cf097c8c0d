"""The pipeline docs: rows parse, code runs, and names exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinkex.data.rows import STAGE_PARSERS
from tinkex.pipeline.checkpoints.step_directory import CONFIG_FILE, REQUIRED_FILES, RNG_FILE
from tinkex.pipeline.config import variable_names
from tinkex.pipeline.settings_options import STAGES
from tinkex.pipeline.settings_sources import stage_options

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
STEPS = (ROOT / "docs" / "step-checkpoints.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorials" / "from-nothing.md").read_text(encoding="utf-8")
#: Names in capitals that are no variables of a run.
OTHER_WORDS = {"TINKEX_HOME", "OMP_NUM_THREADS"}
#: Options of `tinkex`, torchrun and the run script.
OTHER_OPTIONS = {"help", "json", "metric", "from", "standalone", "nproc_per_node"}
OTHER_OPTIONS |= {"smoke-test", "run-r1", "restart-from", "shutdown_timeout", "settings"}


def rows() -> dict[str, str]:
    """Return the documented example row of each stage."""
    found = re.findall(r"`(\w+)_JSON`.*?```json\n(.*?)\n```", GUIDE, re.DOTALL)
    return {stage.lower(): row for stage, row in found}


@pytest.mark.parametrize("stage", STAGES)
def test_documented_rows_parse(stage: str) -> None:
    assert STAGE_PARSERS[stage](json.loads(rows()[stage]))


@pytest.mark.parametrize("page", [GUIDE, STEPS, TUTORIAL], ids=["guide", "steps", "tutorial"])
def test_documented_variables_and_options_exist(page: str) -> None:
    words = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", page))
    assert sorted(words - set(variable_names()) - OTHER_WORDS) == []
    known = {name for stage in STAGES for name in stage_options(stage)} | OTHER_OPTIONS
    prose = re.sub(r"```sh\n.*?```|`tinkex [^`]*`", "", page, flags=re.DOTALL)
    assert sorted(set(re.findall(r"--([a-z][a-z0-9_-]+)", prose)) - known) == []


def test_checkpoint_page_lists_every_file() -> None:
    for name in (*REQUIRED_FILES, RNG_FILE, CONFIG_FILE, "manifest.json", "latest", "pinned"):
        assert f"`{name}`" in STEPS or f"\n    {name} " in STEPS or f"\n  {name} " in STEPS, name


def test_checkpoint_page_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", STEPS, re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "checkpoints/step_00000005 5"
    assert second == "5 {'weight': (2, 4), 'bias': (2,)}"
