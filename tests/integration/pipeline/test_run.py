"""Pipeline runs: which stages are trained, skipped, resumed and rejected."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.support.pipeline_project import TIMEOUT_SECONDS, PipelineProject, project
from tinkex.errors import ConfigError, InvalidInput
from tinkex.pipeline.output_locks import lock_directory
from tinkex.pipeline.run.stage_records import StageStatus

__all__ = ["project"]


def test_first_run_trains_every_stage_from_its_parent(project: PipelineProject) -> None:
    done = project.run("--run-r1")
    assert done.actions == dict.fromkeys(("tokenizer", "pretrain", "sft", "dpo", "r1"), "trained")
    for stage, parent in (("sft", "pretrain"), ("dpo", "sft"), ("r1", "dpo")):
        command = project.record(stage).command
        assert command[command.index("--init_from") + 1] == str(project.out / parent / "hf")
    command = project.record("dpo").command
    assert command[command.index("--ref_path") + 1] == str(project.out / "sft" / "hf")
    assert "--init_from" not in project.record("pretrain").command


def test_r1_is_trained_only_with_run_r1(project: PipelineProject) -> None:
    assert list(project.run().actions) == ["tokenizer", "pretrain", "sft", "dpo"]
    assert not (project.out / "r1").exists()
    again = project.run("--run-r1")
    assert again.actions["r1"] == "trained"
    assert {again.actions[name] for name in ("tokenizer", "pretrain", "sft", "dpo")} == {"skipped"}


def test_failed_demo_does_not_fail_the_run(
    project: PipelineProject, capfd: pytest.CaptureFixture[str]
) -> None:
    done = project.run("--run-r1", R1_DEMO="1", R1_DEMO_PROMPT="Are you there?")
    assert done.actions["r1"] == "trained"
    assert "[r1] prompt: Are you there?" in done.text
    assert "the demo failed; training is complete" in done.text
    assert f"Error: cannot generate with {project.out / 'r1' / 'hf'}" in capfd.readouterr().err


def test_second_smoke_run_prints_the_resume_command(project: PipelineProject) -> None:
    """SAVE_INTERVAL=2 KEEP_LAST=2, twice: step directories, then --resume in the log."""
    first = project.run("--smoke-test", SMOKE_PRETRAIN_STEPS="4")
    assert project.steps("pretrain") == ["step_00000002", "step_00000004"]
    assert "--resume" not in first.text
    second = project.run("--smoke-test", SMOKE_PRETRAIN_STEPS="4")
    newest = project.out / "pretrain" / "checkpoints" / "step_00000004"
    assert f"--resume {newest} --ckpt_dir {newest.parent}" in second.text


def test_finished_run_skips_all_stages(project: PipelineProject) -> None:
    project.run()
    before = {path: path.stat().st_mtime_ns for path in project.out.rglob("*") if path.is_file()}
    done = project.run()
    assert set(done.actions.values()) == {"skipped"}
    assert "Nothing to do" in done.text
    after = {path: path.stat().st_mtime_ns for path in project.out.rglob("*") if path.is_file()}
    changed = {path.name for path in after if before.get(path) != after[path]}
    assert changed <= {"run.log", "run.lock", "trainer.lock"}


def test_directory_of_a_running_trainer_is_not_touched(project: PipelineProject) -> None:
    project.run()
    half = project.out / "sft" / ".partial-hf"
    half.mkdir()
    with (
        lock_directory(project.out / "sft"),
        pytest.raises(ConfigError, match="in use by another trainer"),
    ):
        project.run()
    assert half.is_dir()
    assert set(project.run().actions.values()) == {"skipped"}
    assert not half.exists()


def test_save_interval_and_keep_last_apply_to_every_stage(project: PipelineProject) -> None:
    project.run("--smoke-test", "--run-r1", SAVE_INTERVAL="3", KEEP_LAST="2")
    for stage in ("pretrain", "sft", "dpo", "r1"):
        command = project.record(stage).command
        assert command[command.index("--save_interval") + 1] == "3"
        assert command[command.index("--keep_last_checkpoints") + 1] == "2"
        assert len(project.steps(stage)) == 2


def test_failed_stage_stops_the_run_and_is_resumed(
    project: PipelineProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "fail sft 3")
    done = project.run()
    assert done.error is not None
    assert done.error.exit_code == 1
    assert "sft failed" in done.error.message
    assert "resumes from step 2" in str(done.error.hint)
    assert project.record("sft").status is StageStatus.FAILED
    assert not (project.out / "dpo").exists()
    monkeypatch.delenv("FAKE")
    again = project.run()
    assert again.actions["sft"] == "resumed"
    assert again.actions["dpo"] == "trained"
    words = next(line for line in again.text.splitlines() if line.startswith("[sft] $ "))
    step_dir = project.out / "sft" / "checkpoints" / "step_00000002"
    assert f"--resume {step_dir} --ckpt_dir {step_dir.parent}" in words
    assert shlex.split(words.removeprefix("[sft] $ ")) == project.record("sft").command


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_signal_is_forwarded_to_the_trainer(
    project: PipelineProject, number: signal.Signals, code: int
) -> None:
    process = project.start(FAKE="wait sft 3")
    project.wait_for(project.out / "sft" / "waiting", process)
    process.send_signal(number)
    text = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert process.returncode == code, text
    assert "sft was interrupted; saved at step 3" in text
    assert project.record("sft").status is StageStatus.INTERRUPTED
    again = project.run()
    assert again.actions["sft"] == "resumed"
    assert "checkpoints/step_00000003" in again.text


def test_second_run_reports_the_lock_holder(project: PipelineProject) -> None:
    process = project.start(FAKE="wait pretrain 1")
    project.wait_for(project.out / "pretrain" / "waiting", process)
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} .*training pretrain"):
        project.run()
    process.terminate()
    process.communicate(timeout=TIMEOUT_SECONDS)


def test_trainer_that_outlives_its_run_keeps_the_lock(project: PipelineProject) -> None:
    process = project.start(FAKE="wait pretrain 1")
    project.wait_for(project.out / "pretrain" / "waiting", process)
    trainer = project.record("pretrain").pid
    assert trainer is not None
    process.kill()
    process.wait()
    try:
        with pytest.raises(ConfigError, match=f"in use by trainer {trainer} of a run that"):
            project.run()
    finally:
        os.kill(trainer, signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_SECONDS)
    assert project.record("pretrain").status is StageStatus.RUNNING
    assert project.run().actions["pretrain"] == "resumed"


def test_changed_setting_is_reported_and_rejected(project: PipelineProject) -> None:
    project.run()
    done = project.run(PRETRAIN_ARGS="--learning_rate 0.001", SEED="7")
    assert done.error is not None
    assert "learning_rate: (not given) -> 0.001" in done.error.message
    assert "seed: 1337 -> 7" in done.error.message
    assert "--restart-from pretrain" in str(done.error.hint)


def test_changed_data_is_rejected(project: PipelineProject) -> None:
    project.run()
    path = Path(project.environ["DPO_JSON"])
    path.write_text(path.read_text() * 2)
    done = project.run()
    assert done.error is not None
    assert done.error.message.startswith("the inputs of dpo in ")
    assert "data: " in done.error.message


def test_touched_data_is_unchanged(project: PipelineProject) -> None:
    project.run()
    os.utime(project.environ["SFT_JSON"])
    assert set(project.run().actions.values()) == {"skipped"}


def test_children_of_a_retrained_parent_are_rejected(
    project: PipelineProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.run()
    project.change_result("pretrain", is_recorded=True)
    done = project.run()
    assert done.error is not None
    assert "parent: pretrain was retrained" in done.error.message
    assert "--restart-from sft" in str(done.error.hint)


def test_modified_result_is_rejected(project: PipelineProject) -> None:
    project.run()
    project.change_result("pretrain", is_recorded=False)
    done = project.run()
    assert done.error is not None
    assert "the inputs of pretrain in" in done.error.message
    assert "result: the files differ from those that the trainer wrote" in done.error.message


def test_missing_weights_are_rebuilt_from_the_last_step(
    project: PipelineProject,
) -> None:
    project.run()
    weights = project.out / "sft" / "hf" / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    done = project.run("--run-r1")
    assert done.actions == {
        "tokenizer": "skipped",
        "pretrain": "skipped",
        "sft": "resumed",
        "dpo": "skipped",
        "r1": "trained",
    }
    assert weights.read_bytes() == before


@pytest.mark.parametrize("flags", [("--force-pretrain",), ("--restart-from", "pretrain")])
def test_restart_deletes_a_stage_and_its_children(
    project: PipelineProject, flags: tuple[str, ...]
) -> None:
    project.run("--run-r1")
    (project.out / "r1" / "old").touch()
    done = project.run(*flags, SEED="7")
    assert done.actions == {
        "tokenizer": "skipped",
        "pretrain": "trained",
        "sft": "trained",
        "dpo": "trained",
    }
    assert not (project.out / "r1").exists()
    assert not list(project.out.glob(".partial-*"))
    assert not os.path.lexists(project.out / "reason_512.pth")


def test_stage_without_result_is_resumed(project: PipelineProject) -> None:
    project.run()
    (project.out / "dpo" / "hf" / "config.json").unlink()
    assert project.run().actions["dpo"] == "resumed"


def test_legacy_links_survive_a_move(project: PipelineProject) -> None:
    project.run("--run-r1")
    moved = project.root / "moved"
    project.out.rename(moved)
    for name, stage in (
        ("pretrain_512.pth", "pretrain"),
        ("full_sft_512.pth", "sft"),
        ("rlhf_512.pth", "dpo"),
        ("reason_512.pth", "r1"),
    ):
        link = moved / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.read_text() == stage


def test_skip_pretrain_needs_earlier_weights(project: PipelineProject) -> None:
    with pytest.raises(ConfigError, match="no weights to start SFT from"):
        project.run("--skip-pretrain")
    project.run()
    assert project.run("--skip-pretrain").actions == {"sft": "skipped", "dpo": "skipped"}


def test_pretrained_path_replaces_pretrain(project: PipelineProject) -> None:
    folder = project.root / "base"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    done = project.run(OUT_DIR=str(project.root / "other"), PRETRAINED_PATH=str(folder))
    assert done.actions == {"sft": "trained", "dpo": "trained"}
    assert f"--tokenizer_dir {folder} --init_from {folder}" in done.text


def test_invalid_line_is_reported_before_training(project: PipelineProject) -> None:
    path = Path(project.environ["DPO_JSON"])
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(InvalidInput, match=r"dpo_jsonl, line 2 is not JSON"):
        project.run()
    assert not (project.out / "pretrain").exists()


def test_missing_data_file_is_rejected(project: PipelineProject) -> None:
    with pytest.raises(InvalidInput, match=r"SFT_JSON: .* is not a file"):
        project.run(SFT_JSON=str(project.root / "nowhere.jsonl"))
    assert not (project.out / "tokenizer").exists()


def test_unknown_option_is_rejected_before_training(
    project: PipelineProject,
) -> None:
    with pytest.raises(ConfigError, match="DPO_ARGS has --bta"):
        project.run(DPO_ARGS="--bta 0.2")
    with pytest.raises(ConfigError, match="--beta"):
        project.run(DPO_ARGS="--beta none")
    assert not (project.out / "tokenizer").exists()


def test_extra_options_keep_their_quoting(project: PipelineProject) -> None:
    marker = project.root / "made by a shell"
    path = f"figures $(touch '{marker}'); a b"
    project.run("--run-r1", R1_ARGS=f"--metrics_file {shlex.quote(path)} --epochs 3")
    command = project.record("r1").command
    assert command[command.index("--metrics_file") + 1] == path
    assert command[command.index("--epochs") + 1] == "3"
    assert not marker.exists()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"DPO_ARGS": "--min_learning_rate 1"}, "--min_learning_rate 1.0 is above"),
        ({"MODEL_HIDDEN_SIZE": "100"}, "--hidden_size 100 cannot be split into 8 heads"),
        ({"MODEL_NUM_KV_HEADS": "3"}, "is not a multiple of --num_kv_heads 3"),
        ({"R1_ARGS": "--r1_tokens foo"}, "--r1_tokens has 'foo'"),
        ({"PRETRAIN_ARGS": "--device tpu"}, "expected auto, cpu, cuda, cuda:1 or mps, got 'tpu'"),
        ({"DEVICE": "tpu"}, "DEVICE must be auto, cpu, cuda, cuda:1 or mps; got 'tpu'"),
        ({"R1_DEMO_DEVICE": "tpu"}, "R1_DEMO_DEVICE must be auto"),
        ({"R1_DEMO_TOP_P": "2"}, "R1_DEMO_TOP_P must be a number from 0.001 to 1; got '2'"),
        ({"R1_DEMO_TEMPERATURE": "nan"}, "R1_DEMO_TEMPERATURE must be a number from 0 to 100"),
    ],
)
def test_invalid_options_are_rejected_before_training(
    project: PipelineProject, variables: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        project.run("--run-r1", **variables)
    assert not (project.out / "tokenizer").exists()


def test_unwritable_out_dir_is_reported(
    project: PipelineProject,
) -> None:
    (project.root / "file").touch()
    with pytest.raises(ConfigError, match=r"OUT_DIR: .*file.* is not writable"):
        project.run(OUT_DIR=str(project.root / "file"))


def test_several_processes_use_torchrun(project: PipelineProject) -> None:
    from tinkex.pipeline.config import read_config
    from tinkex.pipeline.run.plan import RunFlags, make_run_plan
    from tinkex.pipeline.run.stage_records import StageStart
    from tinkex.pipeline.run.stage_specs import PRETRAIN

    for variables in ({"NPROC": "2"}, {"NUM_GPUS": "2"}):
        plan = make_run_plan(read_config(environ=project.environ | variables), RunFlags())
        command = plan.command(PRETRAIN, StageStart(), None)
        assert command[1:4] == ["-m", "tinkex.pipeline.run.ranks", "--nproc_per_node=2"]


def test_results_are_printed_and_recorded(project: PipelineProject) -> None:
    done = project.run()
    rows = [line.split() for line in done.text.splitlines()]
    assert ["pretrain", "trained", "eval_loss", "9", "2.25", "4", "400", "1.5"] in rows
    noted = project.out / "eval_results.jsonl"
    lines = [json.loads(line) for line in noted.read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["pretrain", "sft", "dpo"]
    assert lines[0]["metrics"] == {"eval_loss": {"before": 9.0, "after": 2.25}}
    project.run()
    assert len(noted.read_text().splitlines()) == 3
