from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.recipes.stubs import StubService
from tinkex.client.service import ServiceClient
from tinkex.errors import InvalidInput
from tinkex.recipes import sft
from tinkex.recipes.plan import SftPlan
from tinkex.recipes.report import SampledAnswer, Throughput
from tinkex.recipes.run import Run, RunOptions
from tinkex.recipes.run_directory import SavedProgress


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = ({"prompt": f"{n}: ", "completion": "x" * (n + 1)} for n in range(5))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class Trainer:
    """Creates runs in one directory."""

    def __init__(self, data: Path, directory: Path) -> None:
        self.data, self.directory = data, directory
        self.notices: list[str] = []

    def make(self, service: StubService, run_options: Any = None, **settings: Any) -> Any:
        defaults = {"batch_size": 2, "epochs": 3, "save_every": 4, "data": self.data}
        plan = SftPlan(**{"base_model": "m", **defaults, **settings})
        options = RunOptions(**{"run_dir": self.directory, **(run_options or {})})
        return sft.run(plan, cast(ServiceClient, service), options, self.notices.append)


@pytest.fixture
def trainer(data: Path, tmp_path: Path) -> Trainer:
    return Trainer(data, tmp_path / "run")


def losses(run: Run[Any, Any]) -> list[Any]:
    return [row["loss"] for row in run.run_directory.read_metrics()]


def test_next_step_is_sent_before_waiting_for_the_last(trainer: Trainer) -> None:
    service = StubService()
    list(trainer.make(service, steps=3, save_every=2))
    assert service.log[:12] == [
        *("pass", "step", "pass", "step", "save sft-rows-000002"),
        *("wait pass", "wait step"),
        *("pass", "step", "save sft-rows-000003"),
        *("wait pass", "wait step"),
    ]


def test_reports_follow_steps_epochs_and_schedule(trainer: Trainer) -> None:
    service = StubService()
    reports = list(trainer.make(service, learning_rate=1.0, warmup=3))
    assert [report.step for report in reports] == list(range(1, 10))
    assert {report.total for report in reports} == {9}
    assert [report.epoch for report in reports] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert service.rates[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert [report.learning_rate for report in reports] == service.rates
    assert all(report.num_tokens > 0 for report in reports)


def test_end_of_run_saves_and_samples(trainer: Trainer) -> None:
    service = StubService()
    run = trainer.make(service, samples=("ask me",))
    reports = list(run)
    result = run.result
    assert result is not None
    assert (result.is_complete, result.step, result.loss) == (True, 9, reports[-1].loss)
    assert result.state_path == "tinker://run/weights/sft-rows-000009"
    assert result.sampler_path == "tinker://run/sampler_weights/sft-rows-final"
    assert result.samples == (SampledAnswer("ask me", "done"),)
    assert service.prompts == [list(b"ask me")]


def test_default_sample_prompt_is_the_first_row(trainer: Trainer) -> None:
    service = StubService()
    list(trainer.make(service))
    assert service.prompts == [list(b"0: ")]


@pytest.mark.parametrize("prompt", ["", "x" * 100_000])
def test_too_long_sample_prompt_is_skipped(trainer: Trainer, prompt: str) -> None:
    run = trainer.make(StubService(), samples=("ask me", prompt), max_tokens=1000)
    list(run)
    assert run.result is not None and run.result.is_complete
    assert run.result.samples == (SampledAnswer("ask me", "done"),)
    assert any("No sample" in notice for notice in trainer.notices)


def test_failing_samples_leave_a_complete_run(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinkex.recipes.run.generate_samples", fail)
    with pytest.raises(KeyboardInterrupt):
        list(trainer.make(StubService()))
    again = trainer.make(StubService())
    assert list(again) == []
    assert again.result is not None and again.result.sampler_path is not None


def test_complete_run_is_not_repeated(trainer: Trainer) -> None:
    first = trainer.make(StubService())
    list(first)
    service = StubService()
    again = trainer.make(service)
    assert list(again) == []
    assert again.result == first.result
    assert service.log == []
    assert "complete" in trainer.notices[-1]


@pytest.mark.parametrize("num_passes", range(9))
def test_killed_run_resumes_identically(trainer: Trainer, tmp_path: Path, num_passes: int) -> None:
    undisturbed = Trainer(trainer.data, tmp_path / "undisturbed").make(StubService())
    list(undisturbed)
    service = StubService()
    service.passes_left = num_passes
    with pytest.raises(KeyboardInterrupt):
        list(trainer.make(service))
    service.passes_left = None
    again = trainer.make(service)
    list(again)
    assert losses(again) == losses(undisturbed)
    assert [row["step"] for row in again.run_directory.read_metrics()] == list(range(1, 10))
    assert again.result is not None
    assert again.result.is_complete


def test_stopped_run_saves_submitted_steps_and_resumes(trainer: Trainer, tmp_path: Path) -> None:
    undisturbed = Trainer(trainer.data, tmp_path / "undisturbed").make(StubService())
    list(undisturbed)
    service = StubService()
    run = trainer.make(service)
    for _ in run:
        run.stop()
    assert run.result is not None
    assert (run.result.is_complete, run.result.step) == (False, 2)
    assert run.result.state_path == "tinker://run/weights/sft-rows-000002"
    assert service.log.count("pass") == service.log.count("wait pass") == 2
    again = trainer.make(service)
    list(again)
    assert service.opened[-1] == ("resumed", "tinker://run/weights/sft-rows-000002")
    assert losses(again) == losses(undisturbed)


def test_default_run_directory_depends_on_settings_and_data(data: Path) -> None:
    def directory(**settings: Any) -> Path:
        plan = SftPlan(**{"data": data, "base_model": "m", **settings})
        return sft.run(plan, cast(ServiceClient, StubService())).run_directory.directory

    first = directory()
    assert first.parent == Path("runs")
    assert first.name.startswith("sft-rows-")
    assert directory(save_every=3, samples=("a",)) == first
    assert directory(seed=1) != first
    data.write_text('{"prompt": "a", "completion": "b"}')
    assert directory() != first


def interrupted(trainer: Trainer) -> StubService:
    service = StubService()
    run = trainer.make(service)
    for _ in run:
        run.stop()
    return service


def test_changed_settings_are_rejected(trainer: Trainer) -> None:
    service = interrupted(trainer)
    with pytest.raises(InvalidInput, match="have changed: seed was 0 and is 1") as caught:
        list(trainer.make(service, seed=1))
    assert "--restart" in str(caught.value.hint)


def test_changed_data_file_is_rejected(trainer: Trainer) -> None:
    service = interrupted(trainer)
    trainer.data.write_text(trainer.data.read_text() + "\n" + '{"prompt":"a","completion":"b"}')
    with pytest.raises(InvalidInput, match="data_digest was"):
        list(trainer.make(service))


def test_accepted_changes_are_reported_and_the_run_resumes(trainer: Trainer) -> None:
    service = interrupted(trainer)
    reports = list(trainer.make(service, {"accept_changes": True}, learning_rate=0.5))
    assert reports[0].step == 3
    assert any("learning_rate was 0.0001 and is 0.5" in notice for notice in trainer.notices)


def test_complete_run_can_be_extended(trainer: Trainer) -> None:
    service = StubService()
    list(trainer.make(service, steps=4))
    longer = trainer.make(service, {"accept_changes": True}, steps=6)
    assert [report.step for report in longer] == [5, 6]


def test_restart_starts_over(trainer: Trainer) -> None:
    service = interrupted(trainer)
    reports = list(trainer.make(service, {"restart": True}, seed=1))
    assert reports[0].step == 1
    assert service.opened[-1][0] == "m"


def test_missing_saved_state_is_reported(trainer: Trainer) -> None:
    service = interrupted(trainer)
    service.saved.clear()
    with pytest.raises(InvalidInput, match="is no longer on the server") as caught:
        list(trainer.make(service))
    assert "--restart" in str(caught.value.hint)


def test_run_starts_from_a_checkpoint(trainer: Trainer) -> None:
    service, path = StubService(), "tinker://old/weights/x"
    list(trainer.make(service, base_model=None, start_from=path, steps=1))
    assert service.opened == [("from", path)]


def test_evaluation_uses_the_weights_of_its_step(trainer: Trainer) -> None:
    service = StubService()
    reports = list(trainer.make(service, eval_data=trainer.data, eval_every=4, learning_rate=1.0))
    measured = [report.step for report in reports if "eval_loss" in report.metrics]
    assert measured == [4, 8, 9]
    # The loss of a step is computed with the weights before it.
    assert reports[3].metrics["eval_loss"] == pytest.approx(reports[4].loss)
    assert len(set(service.evaluated)) == 3


def test_truncated_and_skipped_rows_are_reported(trainer: Trainer) -> None:
    list(trainer.make(StubService(max_context=4), max_tokens=9, steps=3))
    assert "The model's context is 4 tokens, so examples are truncated to 4" in trainer.notices
    assert any("tokens and was truncated to 4" in notice for notice in trainer.notices)
    assert any(notice.startswith("truncated rows: ") for notice in trainer.notices)


def test_steps_without_targets_send_no_passes(trainer: Trainer) -> None:
    service = StubService()
    reports = list(trainer.make(service, max_tokens=2, steps=2))
    assert [report.loss for report in reports] == [None, None]
    assert "pass" not in service.log
    assert any("is skipped" in notice for notice in trainer.notices)


def test_report_is_flat_json(trainer: Trainer) -> None:
    report = next(iter(trainer.make(StubService(), steps=1)))
    assert json.loads(json.dumps(report.to_dict()))["learned_tokens"] > 0
    assert "metrics" not in report.to_dict()


def test_throughput_covers_the_last_steps() -> None:
    pace = Throughput(started_at=0.0, num_steps=2)
    assert pace.update(1.0, 100) == 100.0
    assert pace.update(2.0, 100) == 100.0
    assert pace.update(3.0, 400) == 250.0


def test_run_killed_at_the_end_keeps_its_loss(trainer: Trainer) -> None:
    service = StubService()
    run = trainer.make(service, steps=2)
    reports = list(run)
    saved = run.run_directory.read_progress()
    assert saved is not None
    run.run_directory.write_progress(SavedProgress(step=saved.step, state_path=saved.state_path))
    again = trainer.make(service, steps=2)
    assert list(again) == []
    assert again.result is not None
    assert again.result.is_complete
    assert again.result.loss == reports[-1].loss
