"""Where the figures of a run go: a line for people, JSON for programs, curves for TensorBoard."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tinkex.logs import get_logger
from tinkex.pipeline.stage_interface import TrainPlan
from tinkex.progress_bar import make_step_progress, make_terminal_console
from tinkex.system.atomic import write_file_atomic

if TYPE_CHECKING:
    from rich.progress import Progress

log = get_logger(__name__)


class MetricSink(Protocol):
    """Takes the figures of a run."""

    def start(self, step: int, total_steps: int) -> None:
        """Begin, or go on, after `step` updates; what was told of later ones no longer holds."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of one update; those on held-out data begin with `eval_`."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class MultiSink:
    """Gives every figure to several sinks."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def start(self, step: int, total_steps: int) -> None:
        """Begin all."""
        for part in self._sinks:
            part.start(step, total_steps)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all."""
        for part in self._sinks:
            part.log(step, values)

    def close(self) -> None:
        """Close all, even if one of them fails."""
        with ExitStack() as stack:
            for part in self._sinks:
                stack.callback(part.close)


class JsonlSink:
    """One JSON object per line; a resumed run drops the lines it is going to write again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def start(self, step: int, total_steps: int) -> None:
        """Keep the lines up to a step, and go on after them."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = "".join(f"{line}\n" for line in filter_lines_until(lines, step))
            write_file_atomic(self._path, kept.encode(), mode=0o644)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line; what JSON has no number for becomes null."""
        if self._file is None:
            return
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **known}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            # Every line was written when it was told; one that could not be has been complained of.
            with suppress(OSError):
                self._file.close()
            self._file = None


def filter_lines_until(lines: Iterable[str], step: int) -> list[str]:
    """The lines of updates up to `step`; a run that starts anew (0) keeps none.

    A line that was cut off by a crash is dropped.
    """
    if step == 0:
        return []
    return [line for line in lines if _is_at_or_before(line, step)]


def _is_at_or_before(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    found = record.get("step") if isinstance(record, dict) else None
    return isinstance(found, int) and found <= step


class ConsoleSink:
    """A bar on a terminal, a line now and then elsewhere.

    A stream that is gone, such as a closed pipe, is not written to again: nobody reads it, and
    training goes on.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._is_live = self._stream.isatty()
        self._total_steps = 0
        self._first_step = 0
        self._started = 0.0
        self._bar: Progress | None = None
        self._is_closed = False

    def start(self, step: int, total_steps: int) -> None:
        """Begin to measure the time that is left."""
        self._first_step, self._total_steps = step, total_steps
        self._started = time.monotonic()
        if step:
            self.write_line(f"[resume] {self._label} step={step}/{total_steps}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show where the run is, or what an evaluation came to."""
        held_out = {name: value for name, value in values.items() if name.startswith("eval_")}
        if held_out:
            self.write_line(f"{self._label} step={step} {format_metrics(held_out)}")
        if "loss" not in values:
            return
        if self._is_live:
            self._write(lambda: self._draw(step, values))
            return
        elapsed = time.monotonic() - self._started
        done = max(1, step - self._first_step)
        left = elapsed / done * max(0, self._total_steps - step)
        self.write_line(format_progress(self._label, step, self._total_steps, values, left))

    def write_line(self, line: str) -> None:
        """Write a line of its own."""
        self.close()
        self._write(lambda: self._print(f"{line}\n"))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._write(self._bar.stop)
            self._bar = None

    def _print(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is None:
            console = make_terminal_console(self._stream, is_colored="NO_COLOR" not in os.environ)
            self._bar = make_step_progress(console, label=self._label, auto_refresh=False)
            self._bar.add_task("", total=self._total_steps, completed=step)
            self._bar.start()
            # A trainer that is killed cannot bring a hidden cursor back.
            console.show_cursor(True)
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=step, description="  ".join(format_step_metrics(values)))
        self._bar.refresh()

    def _write(self, action: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            action()
        # The second is what a stream says that was closed on this side.
        except (OSError, ValueError):
            self._is_closed = True


def format_progress(
    label: str, step: int, total_steps: int, values: Mapping[str, float], seconds_left: float
) -> str:
    """One line: step, loss, learning rate, speed and the time that is left."""
    head, left = f"{label} step {step}/{total_steps}", f"{format_duration(seconds_left)} left"
    return "  ".join([head, *format_step_metrics(values), left])


def format_step_metrics(values: Mapping[str, float]) -> list[str]:
    """The metrics of a step that a person follows."""
    parts = [f"loss {values['loss']:.4f}"]
    if "learning_rate" in values:
        parts.append(f"lr {values['learning_rate']:.2e}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    return parts


def format_metrics(values: Mapping[str, float]) -> str:
    """Figures as `name=value`."""
    return " ".join(f"{name}={value:.4f}" for name, value in values.items())


def format_duration(seconds: float) -> str:
    """A time as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TensorBoardSink:
    """Curves that go on after a resume without a point told twice."""

    def __init__(self, directory: Path, writer_type: Any) -> None:
        self._directory = directory
        self._writer_type = writer_type
        self._writer: Any = None

    def start(self, step: int, total_steps: int) -> None:
        """Open the curves, and take back what was told of later updates."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # What is known of the step itself stays; a run that begins anew has nothing to keep.
        first = step + 1 if step else 0
        self._writer = self._writer_type(str(self._directory), purge_step=first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            group = "eval" if name.startswith("eval_") else "train"
            self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, step)

    def close(self) -> None:
        """Write the last points."""
        if self._writer is not None:
            self._writer.close()


def make_sink(label: str, plan: TrainPlan, metrics_file: Path | None = None) -> MultiSink:
    """The sinks of a plan: metrics.jsonl, TensorBoard if a directory is given, and the console."""
    path = metrics_file if metrics_file is not None else plan.out_dir / "metrics.jsonl"
    # What is kept is told first, whatever happens to the one that is only looked at.
    parts: list[MetricSink] = [JsonlSink(path)]
    if plan.tensorboard_dir is not None:
        writer_type = load_summary_writer()
        if writer_type is None:
            log.warning("no curves are written: tensorboard is missing (tinkex[pipeline] has it)")
        else:
            parts.append(TensorBoardSink(plan.tensorboard_dir, writer_type))
    return MultiSink([*parts, ConsoleSink(label)])


def load_summary_writer() -> Any:
    """The class that writes TensorBoard's files, or None where the package is missing."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return None
