"""Metric sinks: console, metrics.jsonl and TensorBoard."""

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
from typing import TYPE_CHECKING, Protocol, TextIO

from tinkex.logs import get_logger
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.progress_bar import make_step_progress, make_terminal_console
from tinkex.system.atomic import write_file_atomic

if TYPE_CHECKING:
    from rich.progress import Progress

log = get_logger(__name__)


class MetricSink(Protocol):
    """Receives the metrics of a run."""

    def start(self, step: int, total_steps: int) -> None:
        """Start or resume after `step` updates; metrics of later updates are discarded."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one update; names of eval metrics start with `eval_`."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class MultiSink:
    """Forwards all metrics to several sinks."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def start(self, step: int, total_steps: int) -> None:
        """Start all sinks."""
        for sink in self._sinks:
            sink.start(step, total_steps)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log to all sinks."""
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        """Close all sinks, even if one fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class JsonlSink:
    """Writes one JSON object per line; a resumed run drops the lines it will repeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def start(self, step: int, total_steps: int) -> None:
        """Keep the lines up to a step and append after them."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            text = "".join(f"{line}\n" for line in filter_lines_until(lines, step))
            write_file_atomic(self._path, text.encode(), mode=0o644)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line; values that are not finite become null."""
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            # Every line was flushed when it was logged, so a write error was already raised.
            with suppress(OSError):
                self._file.close()
            self._file = None


def filter_lines_until(lines: Iterable[str], step: int) -> list[str]:
    """Return the lines of updates up to `step`; none for a new run (step 0).

    Lines that a crash truncated are dropped.
    """
    if step == 0:
        return []
    return [line for line in lines if _is_at_or_before(line, step)]


def _is_at_or_before(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    logged_step = record.get("step") if isinstance(record, dict) else None
    return isinstance(logged_step, int) and logged_step <= step


class ConsoleSink:
    """Shows a progress bar on a terminal, and prints lines elsewhere.

    After a write error, such as a closed pipe, nothing more is written and training continues.
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
        """Start the estimate of the remaining time."""
        self._first_step, self._total_steps = step, total_steps
        self._started = time.monotonic()
        if step:
            self.write_line(f"[resume] {self._label} step={step}/{total_steps}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show progress or eval metrics."""
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
        """Print a separate line."""
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
            # A killed trainer cannot restore a hidden cursor.
            console.show_cursor(True)
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=step, description="  ".join(format_step_metrics(values)))
        self._bar.refresh()

    def _write(self, action: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            action()
        # ValueError: the stream was closed in this process.
        except (OSError, ValueError):
            self._is_closed = True


def format_progress(
    label: str, step: int, total_steps: int, values: Mapping[str, float], seconds_left: float
) -> str:
    """Format step, loss, learning rate, throughput and remaining time as one line."""
    head, left = f"{label} step {step}/{total_steps}", f"{format_duration(seconds_left)} left"
    return "  ".join([head, *format_step_metrics(values), left])


def format_step_metrics(values: Mapping[str, float]) -> list[str]:
    """Format the metrics of a step for display."""
    parts = [f"loss {values['loss']:.4f}"]
    if "learning_rate" in values:
        parts.append(f"lr {values['learning_rate']:.2e}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    return parts


def format_metrics(values: Mapping[str, float]) -> str:
    """Format metrics as `name=value`."""
    return " ".join(f"{name}={value:.4f}" for name, value in values.items())


def format_duration(seconds: float) -> str:
    """Format a duration as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class EventWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that the sink uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add a point to a curve."""

    def close(self) -> None:
        """Flush and close the event file."""


EventWriterType = Callable[..., EventWriter]


class TensorBoardSink:
    """Writes TensorBoard scalars; a resumed run replaces the points it repeats."""

    def __init__(self, directory: Path, writer_type: EventWriterType) -> None:
        self._directory = directory
        self._writer_type = writer_type
        self._writer: EventWriter | None = None

    def start(self, step: int, total_steps: int) -> None:
        """Open the event file and purge the points of later updates."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # Points of the resumed step stay; a new run purges everything.
        first = step + 1 if step else 0
        self._writer = self._writer_type(str(self._directory), purge_step=first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each scalar."""
        assert self._writer is not None, "start() opens the file"
        for name, value in values.items():
            group = "eval" if name.startswith("eval_") else "train"
            self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


def make_sink(label: str, settings: TrainSettings) -> MultiSink:
    """Create the sinks of a run: metrics.jsonl, TensorBoard (optional) and the console."""
    path = settings.metrics_file or settings.out_dir / "metrics.jsonl"
    # The file comes first, so that it is written even if another sink fails.
    sinks: list[MetricSink] = [JsonlSink(path)]
    if settings.tensorboard_dir is not None:
        writer_type = load_summary_writer()
        if writer_type is None:
            log.warning(
                "TensorBoard logging is disabled: the tensorboard package is missing; "
                "install tinkex[pipeline]"
            )
        else:
            sinks.append(TensorBoardSink(settings.tensorboard_dir, writer_type))
    return MultiSink([*sinks, ConsoleSink(label)])


def load_summary_writer() -> EventWriterType | None:
    """Return TensorBoard's SummaryWriter, or None if the package is missing."""
    try:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    writer_type: EventWriterType = tensorboard.SummaryWriter
    return writer_type
