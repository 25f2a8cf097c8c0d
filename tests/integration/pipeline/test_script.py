"""The run script."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipeline_project import TIMEOUT_SECONDS, PipelineProject, project
from tinkex.pipeline.run.stage_records import StageStatus

__all__ = ["project"]
PROJECT = Path(__file__).parents[3]
SCRIPTS = ("pipelines/run.sh", "scripts/run.sh")


def call(
    project: PipelineProject, script: str, *words: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    prefix = Path(sys.executable).parents[1]
    return subprocess.run(
        [PROJECT / script, *words],
        cwd=project.root,
        env=os.environ | project.environ | {"VENV_DIR": str(prefix)} | environ,
        capture_output=True,
        text=True,
        timeout=3 * TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_flag(project: PipelineProject, script: str) -> None:
    done = call(project, script, "-h")
    assert done.returncode == 0
    for flag in ("--smoke-test", "--skip-pretrain", "--run-r1", "--force-pretrain"):
        assert flag in done.stdout
    assert "--restart-from" in done.stdout


def test_documented_command_twice(project: PipelineProject) -> None:
    first = call(project, "scripts/run.sh", "--smoke-test", OUT_DIR="out")
    assert first.returncode == 0, first.stderr
    assert len(project.steps("pretrain")) == 2
    second = call(project, "scripts/run.sh", "--smoke-test", OUT_DIR="out")
    assert second.returncode == 0, second.stderr
    assert "--resume out/pretrain/checkpoints/step_" in second.stdout
    assert "Nothing to do" in second.stdout


def test_exit_codes_of_wrong_flags_and_variables(project: PipelineProject) -> None:
    assert call(project, "pipelines/run.sh", "--smoke").returncode == 2
    assert call(project, "pipelines/run.sh", "--restart-from", "rl").returncode == 2
    both = call(project, "pipelines/run.sh", "--skip-pretrain", "--force-pretrain")
    assert both.returncode == 2
    wrong = call(project, "pipelines/run.sh", SAVE_INTERVAL="often")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("Error: SAVE_INTERVAL must be")
    assert "Traceback" not in wrong.stderr


def test_failing_stage_ends_the_script_with_a_message(project: PipelineProject) -> None:
    done = call(project, "pipelines/run.sh", FAKE="fail pretrain 1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith("Error: pretrain failed: its trainer exited with code 1")
    assert "run the same command again" in last[1]


def test_tensorboard_uses_another_port_if_busy(project: PipelineProject) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"TB_AUTO": "1", "TF_DIR": "curves", "TB_PORT": str(port)}
        done = call(project, "scripts/run.sh", **variables)
    assert done.returncode == 0, done.stderr
    found = re.search(r"TensorBoard: http://127\.0\.0\.1:(\d+)/ \(pid (\d+)\)", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) != port
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[2]), 0)


def test_no_tensorboard_without_tf_dir(project: PipelineProject) -> None:
    for variables in ({"TB_AUTO": "0", "TF_DIR": "curves"}, {"TB_AUTO": "1", "TF_DIR": ""}):
        done = call(project, "scripts/run.sh", **variables)
        assert done.returncode == 0, done.stderr
        assert "TensorBoard" not in done.stdout


def test_two_processes_train_one_stage(project: PipelineProject) -> None:
    shutil.copy(PROJECT / "trainer" / "train_pretrain.py", project.root / "trainers")
    sizes = {"HIDDEN_SIZE": "32", "NUM_LAYERS": "1", "NUM_HEADS": "2", "NUM_KV_HEADS": "1"}
    variables = {f"MODEL_{name}": value for name, value in sizes.items()}
    variables |= {"OMP_NUM_THREADS": "1", "FAKE": "fail sft 1", "MODEL_SEQ_LEN": "64"}
    variables["PRETRAIN_ARGS"] = "--batch_size 1 --epochs 2 --accumulation_steps 1"
    together = call(project, "scripts/run.sh", NPROC="2", **variables)
    assert "--nproc_per_node=2" in together.stdout
    assert project.record("pretrain").status is StageStatus.COMPLETE, together.stderr
    newest = project.out / "pretrain" / "checkpoints" / project.steps("pretrain")[-1]
    state = json.loads((newest / "state.json").read_text())
    assert (state["world_size"], state["samples"]) == (2, 16)
    # A single process finds the stage complete.
    alone = call(project, "scripts/run.sh", **variables)
    assert "[pretrain] complete at step" in alone.stdout, alone.stderr


def test_two_processes_save_on_a_signal(project: PipelineProject) -> None:
    shutil.copy(PROJECT / "trainer" / "train_pretrain.py", project.root / "trainers")
    sizes = {"HIDDEN_SIZE": "32", "NUM_LAYERS": "1", "NUM_HEADS": "2", "NUM_KV_HEADS": "1"}
    variables = {f"MODEL_{name}": value for name, value in sizes.items()}
    variables |= {
        "OMP_NUM_THREADS": "1",
        "NPROC": "2",
        "MODEL_SEQ_LEN": "64",
        "SAVE_INTERVAL": "100000",
    }
    variables["PRETRAIN_ARGS"] = "--batch_size 1 --epochs 100000 --log_interval 1"
    process = project.start(**variables)
    project.wait_for_line(project.out / "pretrain" / "metrics.jsonl", '"step": 3,', process)
    process.terminate()
    text = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert process.returncode == 143, text
    assert "Traceback" not in text
    (saved,) = project.steps("pretrain")
    assert int(saved.removeprefix("step_")) >= 3
    assert f"saved at step {int(saved.removeprefix('step_'))}" in text


def test_script_without_tinkex_prints_the_install_command(project: PipelineProject) -> None:
    empty = project.root / "empty" / "bin"
    empty.mkdir(parents=True)
    python = empty / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = call(project, "pipelines/run.sh", VENV_DIR=str(empty.parent))
    assert done.returncode == 1
    assert "pip install -e '.[pipeline]'" in done.stderr


def test_missing_data_is_generated_and_reported(project: PipelineProject) -> None:
    for name in ("PRETRAIN_JSON", "SFT_JSON", "DPO_JSON", "R1_JSON"):
        del project.environ[name]
    done = project.run()
    place = project.out / "samples"
    assert (
        f"no data given for pretrain, sft, dpo: using generated sample data in {place}" in done.text
    )
    assert "PRETRAIN_JSON" in done.text
    assert sorted(path.name for path in place.iterdir()) == [
        "dpo.jsonl",
        "pretrain.jsonl",
        "sft.jsonl",
    ]
    assert set(project.run().actions.values()) == {"skipped"}
