"""The tutorial from nothing to a chat model, typed as it stands, with fewer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.acceptance.test_docs_commands import ROOT, run_page, script_of
from tinkex.pipeline.settings_options import STAGES

__all__ = ["run_page"]
pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "tutorials" / "from-nothing.md"
#: Enough to see that every command works; what it shows takes longer.
FEW = {f"SMOKE_{stage.upper()}_STEPS": "3" for stage in STAGES}
FEW |= {f"SMOKE_{stage.upper()}_LIMIT": "40" for stage in STAGES}
FEW |= {f"SMOKE_{stage.upper()}_EVAL_SAMPLES": "2" for stage in STAGES}


def test_the_commands_of_the_tutorial_work(run_page: Callable[..., None]) -> None:
    script = script_of(PAGE).replace("--steps 60", "--steps 4").replace("--save-every 20", "")
    made, found, served = script.partition("tinkex model add my/base")
    # Two scripts, each with the patience of one: the pipeline alone is five processes.
    run_page(f"{made}\ngrep -q eval_exact_match r1.csv", HF_HUB_OFFLINE="1", **FEW)
    for step in ("train sft", "--steps 4", "tinkex chat", "--merge", "serve stop"):
        assert step in served
    files = "ls my-model/model.safetensors adapters/*/adapter_model.safetensors"
    run_page(f"{found}{served}\n{files}", TINKEX_ENGINE="local", HF_HUB_OFFLINE="1")
