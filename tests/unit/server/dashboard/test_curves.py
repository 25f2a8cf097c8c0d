from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.dashboard import curves
from tinkex.server.dashboard.curves import (
    RunCurves,
    drop_steps_before,
    extend_curves,
    max_points_of,
    select_points,
    sort_metrics,
    write_csv,
)
from tinkex.store.records import StepRecord


def step(kind: str, at: float, metrics: dict[str, float], num_tokens: int = 0) -> StepRecord:
    values: dict[str, Any] = {
        "session_id": "s",
        "run_id": "r",
        "sampler_id": None,
        "kind": kind,
        "job_id": "j",
        "num_tokens": num_tokens,
        "metrics": metrics,
        "queued_at": at,
        "started_at": at,
        "finished_at": at + 1,
    }
    return StepRecord(**values)


def updates(*losses: float, **reported: float) -> list[tuple[int, StepRecord]]:
    """A pass of 10 tokens and an optimizer step per loss, numbered from 1."""
    rows = []
    for place, loss in enumerate(losses):
        rows.append(step("forward_backward", 2 * place, {"loss:sum": 10 * loss}, num_tokens=10))
        rows.append(step("optim_step", 2 * place + 1, {"grad_norm": 0.5, **reported}))
    return list(enumerate(rows, 1))


def test_curves_have_every_metric() -> None:
    made = extend_curves(RunCurves(), updates(4.0, 2.0, eval_loss=1.0), 2)

    assert made.columns["loss"].values.tolist() == [4.0, 2.0]
    assert made.columns["loss"].steps.tolist() == [1, 2]
    assert made.columns["tokens_per_second"].values.tolist() == [5.0, 5.0]
    assert set(made.columns) == {"loss", "grad_norm", "eval_loss", "tokens_per_second"}
    assert made.last_step == 2


@given(st.integers(0, 30), st.integers(0, 30))
def test_extended_curves_equal_full_curves(num_steps: int, cut: int) -> None:
    rows = updates(*(float(number) for number in range(num_steps)))
    cut = min(cut, len(rows))
    num_before = sum(1 for _, row in rows[:cut] if row.kind == "optim_step")

    first = extend_curves(RunCurves(), rows[:cut], num_before)
    both = extend_curves(first, [row for row in rows if row[0] > first.last_no], num_steps)

    assert both == extend_curves(RunCurves(), rows, num_steps)
    assert first == extend_curves(RunCurves(), rows[:cut], num_before)


def test_deleted_steps_are_dropped() -> None:
    made = extend_curves(RunCurves(), updates(4.0, 3.0, 2.0), 3)

    kept = drop_steps_before(made, 3)

    assert kept.columns["loss"].steps.tolist() == [3]
    assert drop_steps_before(made, 9).columns == {}
    assert drop_steps_before(made, 1) is made


def test_number_of_metrics_is_limited() -> None:
    many = {f"metric_{number}": 1.0 for number in range(200)}

    made = extend_curves(RunCurves(), updates(1.0, **many), 1)

    assert len(made.columns) == curves.MAX_METRICS
    assert made.num_left_out == 203 - curves.MAX_METRICS


def test_points_are_selected_with_extremes_and_neighbours() -> None:
    values = [0.0] * 5000
    values[1234] = 99.0
    column = extend_curves(RunCurves(), updates(*values), 5000).columns["loss"]

    steps, drawn = select_points(column, 100)
    assert len(steps) <= 100
    assert (steps[0], steps[-1]) == (1, 5000)
    assert drawn[steps.index(1235)] == 99.0
    assert select_points(column, 100, 10, 12)[0] == [9, 10, 11, 12, 13]
    assert select_points(column, 100, 9000, 9001)[0] == [5000]


@pytest.mark.parametrize(("num_curves", "expected"), [(0, 1000), (1, 1000), (120, 500), (9999, 50)])
def test_answers_have_a_limited_number_of_points(num_curves: int, expected: int) -> None:
    assert max_points_of(num_curves) == expected


def test_metrics_are_sorted_by_importance() -> None:
    names = ["zeta", "tokens_per_second", "eval_loss", "alpha", "grad_norm", "reward", "loss"]

    assert sort_metrics(names) == [
        "loss",
        "reward",
        "eval_loss",
        "grad_norm",
        "tokens_per_second",
        "alpha",
        "zeta",
    ]


def test_csv_has_a_row_per_step_and_no_formula() -> None:
    made = extend_curves(RunCurves(), updates(4.0, 2.0), 2)
    hostile = extend_curves(RunCurves(), updates(1.0, **{"=cmd()": 3.0}), 1)

    assert write_csv(made).splitlines() == [
        "step,loss,grad_norm,tokens_per_second",
        "1,4.0,0.5,5.0",
        "2,2.0,0.5,5.0",
    ]
    assert "'=cmd()" in write_csv(hostile).splitlines()[0]
