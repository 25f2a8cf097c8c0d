"""The full pipeline with the real trainers and a minimal model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tinkex.pipeline.settings_sources import from_flags, from_json

PROJECT = Path(__file__).parents[3]
STAGES = ("pretrain", "sft", "dpo", "r1")
TINY = {
    "MODEL_HIDDEN_SIZE": "32",
    "MODEL_NUM_LAYERS": "1",
    "MODEL_NUM_HEADS": "2",
    "MODEL_NUM_KV_HEADS": "1",
    "MODEL_SEQ_LEN": "64",
    "VOCAB_SIZE": "400",
    "TF_DIR": "",
    "R1_DEMO_PROMPT": "-h, or what?",
    "R1_DEMO_MAX_NEW_TOKENS": "3",
    **{f"SMOKE_{stage.upper()}_STEPS": "4" for stage in STAGES},
    **{f"SMOKE_{stage.upper()}_BATCH": "2" for stage in STAGES},
    **{f"SMOKE_{stage.upper()}_LIMIT": "40" for stage in STAGES},
    **{f"SMOKE_{stage.upper()}_EVAL_SAMPLES": "2" for stage in STAGES},
}


def run(directory: Path) -> str:
    """Run the documented command and return its output."""
    variables = {"SAVE_INTERVAL": "2", "KEEP_LAST": "2", "TB_AUTO": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PROJECT / "scripts" / "run.sh", "--smoke-test", "--run-r1"],
        cwd=directory,
        env=os.environ | TINY | variables | {"VENV_DIR": str(Path(sys.executable).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_documented_command_trains_all_stages(tmp_path: Path) -> None:
    first = run(tmp_path)
    out = tmp_path / "out"
    parent = json.loads((out / "tokenizer" / "stage.json").read_text())["digest"]
    for stage in STAGES:
        steps = sorted(path.name for path in (out / stage / "checkpoints").glob("step_*"))
        assert steps == ["step_00000002", "step_00000004"]
        record = json.loads((out / stage / "stage.json").read_text())
        result = json.loads((out / stage / "result.json").read_text())
        assert (record["status"], record["parent_digest"]) == ("complete", parent)
        assert (out / stage / "hf" / "model.safetensors").is_file()
        # The printed command and the file of the trainer have the same settings.
        flags = record["command"][record["command"].index("--out_dir") :]
        settings = from_json(stage, (out / stage / "settings.json").read_bytes())
        assert from_flags(stage, flags) == settings
        assert result["steps"] == 4
        parent = result["digest"]
    for name in ("pretrain_32", "full_sft_32", "rlhf_32", "reason_32"):
        assert (out / f"{name}.pth").stat().st_size > 0
    assert "--resume" not in first
    assert "[r1] prompt: -h, or what?\n" in first
    assert "the demo failed" not in first
    second = run(tmp_path)
    assert "[r1] prompt" not in second
    for stage in STAGES:
        folder = f"out/{stage}/checkpoints"
        assert f"--resume {folder}/step_00000004 --ckpt_dir {folder}" in second
        assert f"[{stage}] complete at step 4" in second
