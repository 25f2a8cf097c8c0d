"""Recipes against a server over HTTP with a small fake model."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.integration.conftest import BASE_MODEL, TIMEOUT_SECONDS, Connect, Serve
from tests.integration.recipes.conftest import KINDS, losses, make_plan, start, write_data
from tinkex import AdamParams, ServiceClient
from tinkex.data.jsonl import JsonlFile
from tinkex.data.rendering import Renderer
from tinkex.data.rows import parse_preference
from tinkex.ids import parse_tinker_path
from tinkex.testing import Fault, StubServer, ToyTokenizer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_loss_decreases(kind: str, service: ServiceClient, tmp_path: Path) -> None:
    run = start(make_plan(tmp_path, kind, epochs=8), service, tmp_path / "run")
    found = [report.loss for report in run]
    assert fmean(found[-2:]) < 0.8 * fmean(found[:2])


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_rewards_increase(loss: str, service: ServiceClient, tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, "rl", epochs=5, learning_rate=0.5, group_size=64, answer_tokens=4, loss=loss
    )
    rewards = [report.metrics["reward"] for report in start(plan, service, tmp_path / "run")]
    assert fmean(rewards[-2:]) > 1.5 * fmean(rewards[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_run_writes_checkpoints_and_a_sample(
    kind: str, service: ServiceClient, tmp_path: Path
) -> None:
    run = start(make_plan(tmp_path, kind), service, tmp_path / "run")
    for _ in run:
        pass
    assert run.result is not None
    assert run.result.state_path is not None
    assert run.result.sampler_path is not None
    assert len(run.result.samples) == 1
    paths = [
        each.tinker_path
        for each in service.rest_client().list_user_checkpoints().result().checkpoints
    ]
    names = {path.rpartition("/")[2] for path in paths}
    assert names >= {f"{kind}-{kind}-00000{n}" for n in (2, 4, 6)} | {f"{kind}-{kind}-final"}
    assert {run.result.state_path, run.result.sampler_path} <= set(paths)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_run_resumes_identically(kind: str, service: ServiceClient, tmp_path: Path) -> None:
    undisturbed = start(make_plan(tmp_path, kind), service, tmp_path / "undisturbed")
    assert len(list(undisturbed)) == 6
    stopped = start(make_plan(tmp_path, kind), service, tmp_path / "run")
    for report in stopped:
        if report.step == 2:
            stopped.stop()
    assert stopped.result is not None
    assert stopped.result.step == 3
    again = start(make_plan(tmp_path, kind), service, tmp_path / "run")
    assert [report.step for report in again] == [4, 5, 6]
    assert losses(again) == losses(undisturbed)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_run_resumes_from_its_last_checkpoint(
    kind: str, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    server, count = serve(), itertools.count()
    # The server rejects later steps, so that the process is still training when it is killed.
    server.inject("optim_step", Fault(status=503), None, lambda call: next(count) >= 4)
    service = connect(server, tokenizer_loader=lambda name: ToyTokenizer())
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.integration.recipes.killed_run"),
            *(server.url, kind, str(tmp_path), str(tmp_path / "run")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        server.wait_for("optim_step", 5, TIMEOUT_SECONDS)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    server.clear_faults()
    again = start(make_plan(tmp_path, kind), service, tmp_path / "run")
    for _ in again:
        pass
    undisturbed = start(make_plan(tmp_path, kind), service, tmp_path / "undisturbed")
    for _ in undisturbed:
        pass
    assert losses(again) == losses(undisturbed)
    assert [row["step"] for row in again.run_directory.read_metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_eval_data_is_evaluated(kind: str, service: ServiceClient, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, kind, eval_every=4)
    run = start(make_plan(tmp_path, kind, eval_every=4, eval_data=plan.data), service, tmp_path)
    name = "eval_reward" if kind == "rl" else "eval_loss"
    measured = [report.step for report in run if name in report.metrics]
    assert measured == [4, 6]
    assert run.result is not None
    assert name in run.result.metrics


def test_groups_without_signal_are_counted(
    service: ServiceClient, server: StubServer, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path, "rl", steps=2)
    (tmp_path / "judge.py").write_text("def reward(row, text):\n    return 1.0\n")
    reports = list(start(plan, service, tmp_path / "run"))
    assert [report.metrics["groups_without_signal"] for report in reports] == [3.0, 3.0]
    assert [report.loss for report in reports] == [None, None]
    assert server.calls("optim_step") == []


def test_dpo_step_matches_the_loss_in_torch(service: ServiceClient, tmp_path: Path) -> None:
    """Both take one step from the same weights on the same pairs, with the same result."""
    import torch

    plan = make_plan(tmp_path, "dpo", batch_size=6, steps=2, schedule="constant")
    second = list(start(plan, service, tmp_path / "run"))[1]
    renderer = Renderer(ToyTokenizer())
    pairs = JsonlFile(plan.data, parse_preference).read_rows(range(6))
    examples = [example for pair in pairs for example in renderer.render_pair(pair)]
    data = [example.to_datum() for example in examples]
    training = service.create_lora_training_client(BASE_MODEL, rank=32, seed=0)
    scored = training.forward(data, "cross_entropy").result().loss_fn_outputs
    reference = [
        example.sum_target_logprobs(each["logprobs"].tolist())
        for example, each in zip(examples, scored, strict=True)
    ]

    def loss(data: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        sums = [
            (each * torch.tensor(example.is_learned[1:])).sum() - start
            for example, each, start in zip(examples, logprobs, reference, strict=True)
        ]
        margins = 0.1 * (torch.stack(sums[0::2]) - torch.stack(sums[1::2]))
        return -torch.nn.functional.logsigmoid(margins).mean(), {}

    training.forward_backward_custom(data, loss).result()
    training.optim_step(AdamParams(learning_rate=0.1, grad_clip_norm=1.0)).result()
    after = training.forward_backward_custom(data, loss).result().metrics["loss:sum"]
    assert second.loss == pytest.approx(after, abs=1e-5)


def test_dpo_reference_is_the_start_checkpoint_after_a_resume(
    service: ServiceClient, tmp_path: Path
) -> None:
    first = start(make_plan(tmp_path, "sft"), service, tmp_path / "sft")
    for _ in first:
        pass
    assert first.result is not None
    settings = {"base_model": None, "start_from": first.result.state_path}
    run = start(make_plan(tmp_path, "dpo", **settings), service, tmp_path / "run")
    for report in run:
        if report.step == 1:
            assert report.metrics["margin"] == pytest.approx(0.0, abs=1e-5)
            run.stop()
    saved = run.run_directory.read_progress()
    assert saved is not None
    assert str(saved.reference_path).endswith("/sampler_weights/dpo-dpo-reference")
    again = start(make_plan(tmp_path, "dpo", **settings), service, tmp_path / "run")
    undisturbed = start(make_plan(tmp_path, "dpo", **settings), service, tmp_path / "undisturbed")
    for each in (again, undisturbed):
        for _ in each:
            pass
    assert losses(again) == losses(undisturbed)


@pytest.mark.parametrize(
    ("kind", "names"), [("dpo", ["loss", "accuracy", "margin"]), ("rl", ["loss", "reward", "kl"])]
)
def test_recipe_metrics_are_reported_to_the_server(
    kind: str, names: list[str], service: ServiceClient, tmp_path: Path
) -> None:
    run = start(
        make_plan(tmp_path, kind, eval_data=write_data(tmp_path, kind)), service, tmp_path / "run"
    )
    reports = list(run)
    assert run.result is not None and run.result.state_path is not None
    run_id = parse_tinker_path(run.result.state_path).run_id

    steps = service.rest_client().get_run_metrics(run_id).result(TIMEOUT_SECONDS).steps

    trained = [report for report in reports if report.num_tokens]
    assert len(steps) == len(trained) > 0
    for step, report in zip(steps, trained, strict=True):
        known = {"loss": report.loss, **report.metrics}
        assert [name for name in names if name not in known] == []
        assert step.loss == report.loss
        assert {name: step.metrics[name] for name in known} == known
    assert any(name.startswith("eval_") for name in steps[-1].metrics)
    shown = {name: run.result.metrics[name] for name in names[1:]}
    assert shown == {name: reports[-1].metrics[name] for name in names[1:]}


def test_metrics_are_reported_once_to_a_server_that_rejects_them(
    server: StubServer, service: ServiceClient, tmp_path: Path
) -> None:
    server.inject("report_run_metrics", Fault(status=404), times=None)

    reports = list(start(make_plan(tmp_path, "dpo"), service, tmp_path / "run"))

    assert len(reports) == 6
    assert len(server.calls("report_run_metrics")) <= 2
