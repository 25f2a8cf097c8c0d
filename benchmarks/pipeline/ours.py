"""Our side: `tinkex.pipeline.train.loop.train` itself, watched through its data and its metrics."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.pipeline.timeline import Timeline
from tinkex.pipeline.checkpoints.saver import Saver
from tinkex.pipeline.stage_interface import BatchSource, MicroBatch
from tinkex.pipeline.train.loop import train


class _TimedSource:
    """A source that notes when it is asked; all batches of this benchmark are whole updates."""

    def __init__(self, source: BatchSource, timeline: Timeline) -> None:
        self._source, self._timeline = source, timeline

    def num_batches(self, epoch: int) -> int:
        return self._source.num_batches(epoch)

    def batch(self, epoch: int, index: int) -> MicroBatch:
        self._timeline.begin()
        batch = self._source.batch(epoch, index)
        self._timeline.tokens.append(batch.num_tokens)
        return batch


class _TimedMetrics:
    """A sink that records when an update is logged."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def start(self, step: int, total_steps: int) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "loss" in values:
            self._timeline.end()
            self._timeline.losses.append(values["loss"])

    def close(self) -> None:
        pass


@contextmanager
def _record_waits(timeline: Timeline) -> Iterator[None]:
    # The loop does not report how long it waits, so measure it here.
    wait_for_copy = Saver.wait_for_copy

    def timed(saver: Saver) -> None:
        started = time.perf_counter()
        wait_for_copy(saver)
        timeline.waits.append(time.perf_counter() - started)

    with patch.object(Saver, "wait_for_copy", timed):
        yield


def run(stage: Any, *, num_updates: int = 0, **changes: Any) -> Timeline:
    """Train a stage for some updates or an epoch, starting from its current weights."""
    timeline, source = Timeline(), stage.source
    settings = replace(stage.inputs.settings, max_steps=num_updates, **changes)
    stage.source = _TimedSource(source, timeline)
    try:
        with _record_waits(timeline):
            train(stage, settings, sink=_TimedMetrics(timeline))
    finally:
        stage.source = source
        # The next run starts over and rejects existing steps.
        shutil.rmtree(settings.checkpoint_root, ignore_errors=True)
    return timeline
