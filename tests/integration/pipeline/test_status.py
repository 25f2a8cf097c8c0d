"""Status of stages during and after a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pipeline_project import TIMEOUT_SECONDS, PipelineProject, project
from tinkex.errors import ConfigError
from tinkex.pipeline.run.stage_records import StageResult
from tinkex.pipeline.run.status import list_stage_summaries, newest_step, read_metrics

__all__ = ["project"]


def test_empty_directory_has_no_stages(tmp_path: Path) -> None:
    assert list_stage_summaries(tmp_path / "nowhere") == []


def test_finished_run_is_complete(project: PipelineProject) -> None:
    project.run()
    views = {view.stage: view for view in list_stage_summaries(project.out)}
    assert list(views) == ["tokenizer", "pretrain", "sft", "dpo"]
    assert {view.status for view in views.values()} == {"complete"}
    dpo = views["dpo"]
    assert (dpo.step, dpo.saved_step, dpo.loss, dpo.stale) == (4, 4, 2.25, None)
    assert dpo.metrics["eval_loss"].after == 2.25
    assert dpo.updated_at is not None


def test_status_of_running_and_killed_stages(project: PipelineProject) -> None:
    process = project.start(FAKE="wait sft 3")
    project.wait_for(project.out / "sft" / "waiting", process)
    running = list_stage_summaries(project.out)[-1]
    assert (running.stage, running.status, running.step) == ("sft", "running", 3)
    trainer = project.record("sft").pid
    assert running.pid == trainer
    process.terminate()
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert list_stage_summaries(project.out)[-1].status == "interrupted"
    record = project.out / "sft" / "stage.json"
    record.write_text(record.read_text().replace('"interrupted"', '"running"'))
    assert list_stage_summaries(project.out)[-1].status == "died"


def test_changed_parent_makes_its_child_stale(project: PipelineProject) -> None:
    project.run()
    project.change_result("pretrain", is_recorded=True)
    views = {view.stage: view.stale for view in list_stage_summaries(project.out)}
    assert views["sft"] == "pretrain has changed since sft was trained"
    assert views["dpo"] is None


def test_status_changes_nothing_on_disk(project: PipelineProject) -> None:
    project.run()
    aside = project.out / "sft" / "checkpoints" / ".replaced-step_00000099"
    aside.mkdir()
    list_stage_summaries(project.out)
    assert aside.is_dir()


def test_truncated_metrics_line_is_dropped(project: PipelineProject) -> None:
    project.run()
    path = project.out / "sft" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')
    assert [row["step"] for row in read_metrics("sft", project.out)] == [1, 2, 3, 4]
    assert list_stage_summaries(project.out)[2].step == 4
    with pytest.raises(ConfigError, match="r1 has no metrics yet"):
        read_metrics("r1", project.out)


@pytest.mark.parametrize(
    ("logged", "saved", "steps", "shown"),
    [(110, 117, None, 117), (120, 100, None, 120), (110, 110, 113, 113), (None, None, None, None)],
)
def test_newest_step_includes_unlogged_steps(
    logged: int | None, saved: int | None, steps: int | None, shown: int | None
) -> None:
    result = None if steps is None else StageResult(stage="sft", steps=steps, digest="0")
    assert newest_step(logged, saved, result) == shown


def test_repeated_steps_are_counted_once(project: PipelineProject) -> None:
    project.run()
    path = project.out / "sft" / "metrics.jsonl"
    again = [
        {"step": 4, "loss": 8.0},
        {"step": 3, "loss": 7.0},
        {"step": 4, "loss": 6.0},
        {"step": 4, "eval_loss": 6.5},
    ]
    path.write_text(path.read_text() + "".join(f"{json.dumps(row)}\n" for row in again))
    rows = read_metrics("sft", project.out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4]
    assert [row.get("loss") for row in rows[2:]] == [7.0, 6.0, None]
