from __future__ import annotations

import io
import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tinkex.pipeline.train.metrics import (
    ConsoleSink,
    JsonlSink,
    MultiSink,
    filter_lines_until,
    format_duration,
    format_progress,
    make_sink,
)
from tinkex.pipeline.train_settings import TrainSettings


def write(path: Path, first: int, last: int, resumed_after: int = 0) -> None:
    sink = MultiSink([JsonlSink(path)])
    sink.start(resumed_after, 10)
    for step in range(first, last + 1):
        sink.log(step, {"loss": float(step)})
    sink.close()


def test_resumed_run_logs_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 6)
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    write(path, 5, 8, resumed_after=4)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))


def test_new_run_drops_lines_of_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 6)
    write(path, 1, 2)
    assert len(path.read_text().splitlines()) == 2


def test_non_finite_values_become_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.start(0, 1)
    sink.log(1, {"loss": math.nan, "perplexity": math.inf})
    sink.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 1, "loss": None, "perplexity": None}


@given(st.lists(st.text()), st.integers(0, 5))
def test_filter_accepts_any_text(lines: list[str], step: int) -> None:
    assert set(filter_lines_until(lines, step)) <= set(lines)


def test_progress_line_shows_loss_throughput_and_remaining_time() -> None:
    values = {"loss": 2.5, "learning_rate": 6e-4, "tokens_per_second": 12345.6}
    line = format_progress("sft", 5, 10, values, 83.0)
    assert line == "sft step 5/10  loss 2.5000  lr 6.00e-04  12,346 tokens/s  1:23 left"
    assert format_duration(3661) == "1:01:01"


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_terminal_progress_bar_stays_on_one_line() -> None:
    stream = Terminal()
    console = ConsoleSink("sft", stream)
    console.start(0, 3)
    for step in (1, 2):
        console.log(step, {"loss": 1.0})
    console.log(2, {"eval_loss": 0.5})
    console.close()
    drawn, _, last = stream.getvalue().rpartition("\x1b[2K")
    assert "2/3" in drawn
    assert "━" in drawn
    assert last == "sft step=2 eval_loss=0.5000\n"


def test_closed_stream_is_not_written_to_again() -> None:
    stream = Terminal()
    console = ConsoleSink("sft", stream)
    console.start(0, 3)
    console.log(1, {"loss": 1.0})
    stream.close()
    console.log(2, {"loss": 1.0, "eval_loss": 0.5})
    console.close()


def test_metrics_file_is_written_before_the_console(tmp_path: Path) -> None:
    sinks = make_sink("sft", TrainSettings(out_dir=tmp_path, data_path=tmp_path / "data.jsonl"))
    assert [type(part) for part in sinks._sinks] == [JsonlSink, ConsoleSink]


def test_resume_is_printed() -> None:
    stream = io.StringIO()
    ConsoleSink("sft", stream).start(4, 10)
    assert stream.getvalue() == "[resume] sft step=4/10\n"
