"""Text charts, plot files and the output of `run watch`."""

from __future__ import annotations

import csv
import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.context import Screen
from tinkex.cli.errors import CliError
from tinkex.cli.output.live_view import render_run
from tinkex.cli.output.plots import RunPlot, draw_text_chart, metric_names
from tinkex.cli.output.run_watch import JsonRunView, StepNumbering, TextRunView
from tinkex.types import RunMetricsResponse, RunStep

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = "s-1:train:0"


def step(number: int, loss: float | None = 1.0, **fields: Any) -> RunStep:
    known: dict[str, Any] = {
        "step": number,
        "cursor": 10 * number,
        "loss": loss,
        "num_tokens": 100,
        "num_passes": 1,
        "seconds": 2.0,
        "finished_at": WHEN,
        "metrics": {"grad_norm": 0.5},
    }
    return RunStep(**known | fields)


def page(*steps: RunStep, **fields: Any) -> RunMetricsResponse:
    known: dict[str, Any] = {
        "training_run_id": RUN,
        "steps": list(steps),
        "num_steps": len(steps),
        "loss": 1.0,
        "tokens_per_second": 50.0,
    }
    return RunMetricsResponse(**known | fields)


points = st.lists(
    st.floats(min_value=-1e9, max_value=1e9, allow_nan=False), min_size=1, max_size=60
)


@given(points, st.integers(1, 200), st.integers(1, 40), st.booleans())
def test_chart_fits_its_size(
    values: list[float], width: int, height: int, is_unicode: bool
) -> None:
    lines = draw_text_chart(
        list(enumerate(map(float, values), 1)), width, height, is_unicode=is_unicode
    )
    assert len(lines) == max(height, 4) + 2
    assert max(map(len, lines)) <= max(width, 40)
    assert is_unicode or all(line.isascii() for line in lines)


def test_chart_has_several_y_labels() -> None:
    lines = draw_text_chart([(1.0, 9.3), (2.0, 0.3)], 60, 10)
    labels = [line.split("│")[0].strip() for line in lines if "│" in line]
    assert [label for label in labels if label] == ["8", "6", "4", "2"]


def test_falling_values_fall_in_chart() -> None:
    lines = draw_text_chart(
        [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)], 40, 8, is_unicode=False
    )
    columns = [line.index("*") for line in lines if "*" in line]
    assert columns == sorted(columns)
    assert columns[0] < columns[-1]
    assert lines[-1].split() == ["1", "2", "3", "4"]


def test_non_finite_values_are_skipped() -> None:
    assert draw_text_chart([], 40, 8) == []
    assert draw_text_chart([(1.0, float("nan"))], 40, 8) == []
    assert draw_text_chart([(1.0, 2.0), (2.0, float("inf"))], 40, 8)


def test_csv_has_all_metrics() -> None:
    steps = [step(1, 2.5), step(2, None, metrics={"grad_norm": 0.25, "step": 2.0})]
    rows = list(csv.reader(io.StringIO(RunPlot(RUN, "loss", steps).to_csv().decode())))
    assert rows[0] == [
        "step", "finished_at", "loss", "tokens", "seconds", "tokens_per_second", "grad_norm",
    ]  # fmt: skip
    assert rows[1] == ["1", "2026-01-02T03:04:05+00:00", "2.5", "100", "2.0", "50.0", "0.5"]
    assert rows[2][2] == ""
    assert metric_names(steps) == rows[0][2:]


def test_svg_is_valid_and_titled(tmp_path: Path) -> None:
    plot = RunPlot("<run> & co", "loss", [step(n, 5.0 / n) for n in range(1, 30)])
    root = ElementTree.fromstring(plot.to_svg())
    assert root.tag.endswith("svg")
    assert "<run> & co" in "".join(root.itertext())
    assert any(part.tag.endswith("polyline") for part in root.iter())
    plot.write(tmp_path / "a" / "b.SVG")
    assert (tmp_path / "a" / "b.SVG").read_bytes() == plot.to_svg()
    assert ElementTree.fromstring(RunPlot(RUN, "loss", []).to_svg()).tag.endswith("svg")


@pytest.mark.parametrize("format", ["table", "json"])
def test_plot_without_steps(format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    RunPlot(RUN, "loss", []).print(format, Screen(width=60))
    shown = capsys.readouterr().out
    if format == "json":
        assert json.loads(shown) == {"training_run_id": RUN, "metric": "loss", "points": []}
    else:
        assert shown == f"loss of {RUN}: no steps yet\n"


def test_png_without_matplotlib_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plot = RunPlot(RUN, "loss", [step(1), step(2)])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CliError, match="needs matplotlib") as refused:
        plot.to_png()
    assert "[plot]" in (refused.value.hint or "")


# --- watching ---------------------------------------------------------------------------------


def test_json_view_prints_one_object_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonRunView(once=False)
    view.show(page(step(1), step(2, 0.5)))
    view.show(page(num_waiting=3))
    view.show(page(step(3, 0.25)))
    view.show(page(status="finished", num_steps=3))
    view.finish()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["loss"], row["status"]) for row in rows] == [
        (1, 1.0, "active"),
        (2, 0.5, "active"),
        (3, 0.25, "active"),
        (3, 1.0, "finished"),
    ]
    assert rows[0]["finished_at"] == "2026-01-02T03:04:05+00:00"
    assert rows[0]["tokens_per_second"] == 50.0


def test_json_view_with_once_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    JsonRunView(once=True).show(page(step(1), step(2, 0.5)))
    assert json.loads(capsys.readouterr().out)["step"] == 2
    JsonRunView(once=True).show(page())
    assert json.loads(capsys.readouterr().out)["step"] == 0


def test_text_view_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = TextRunView(once=False, stdout=Screen(), stderr=Screen())
    view.show(page(step(7), num_waiting=2, num_running=1))
    view.show(page(status="lost", num_steps=1))
    view.finish()
    told = capsys.readouterr()
    assert told.out == "step 7  loss 1.0000  100 tokens  2.0s  50 tokens/s  2 waiting, 1 running\n"
    assert told.err.startswith(f"{RUN}: interrupted, 7 steps, loss 1.0000, 50 tokens/s")


def test_once_summary_wraps_between_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_id = "82810c9f-dd83-49e2-8069-20d10792b196:train:12"
    shown = page(step(12_345), training_run_id=run_id, tokens_per_second=12_345.0)
    TextRunView(once=True, stdout=Screen(True, width=80), stderr=Screen()).show(shown)
    assert capsys.readouterr().out.splitlines() == [
        f"{run_id}: training, 12,345 steps,",
        "loss 1.0000, 12,345 tokens/s, nothing queued",
    ]
    # A pipe has unlimited width.
    TextRunView(once=True, stdout=Screen(width=80), stderr=Screen()).show(shown)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_step_numbers_continue_after_server_deletes_steps() -> None:
    numbering = StepNumbering()
    assert [number for number, _ in numbering.number([step(9), step(10)])] == [9, 10]
    assert [number for number, _ in numbering.number([step(8)])] == [11]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_live_view_fits_the_screen(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    steps = [(number, step(number, 5.0 / number)) for number in range(1, 50)]
    console.print(render_run(page(num_steps=49), steps, width))
    console.print(render_run(page(), [], width))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "49" in shown
    assert "No optimizer step yet." in shown
