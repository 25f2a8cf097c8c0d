"""The training loop of all stages: updates, evaluation, checkpoints and graceful stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tinkex.errors import CheckpointError, InvalidInput
from tinkex.nn.adamw import NonFiniteGradient
from tinkex.nn.ranks import DistributedContext, RankFailed, init_distributed
from tinkex.pipeline.checkpoints.resume import (
    RestoreTarget,
    choose_checkpoint,
    describe_run,
    is_rewind,
    restore,
)
from tinkex.pipeline.checkpoints.saver import Saver
from tinkex.pipeline.optimizers import make_optimizer
from tinkex.pipeline.stage_interface import (
    Stage,
    TrainResult,
    UpdateWindow,
    count_updates,
    next_window,
)
from tinkex.pipeline.train.metrics import MetricSink
from tinkex.pipeline.train.signals import STOP_SIGNALS, StopRequest, catch_signals
from tinkex.pipeline.train.update import (
    UpdateSums,
    accumulate,
    check_loss,
    scale_gradients,
    sum_over_ranks,
)
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.train_state import TrainState, capture_rng, restore_rng, seed_everything
from tinkex.pipeline.weights import named_weights

#: Subdirectory of out_dir for the exported Hugging Face folder.
EXPORT_NAME = "hf"


def train(stage: Stage, settings: TrainSettings, *, sink: MetricSink) -> TrainResult:
    """Train a stage until its end or a signal.

    Checkpoints are atomic, and a resumed run is bit-identical to an uninterrupted one. Before an
    error is raised, the last finished update is saved.
    """
    with init_distributed() as ranks, catch_signals(StopRequest()) as stop:
        run = _TrainingRun(
            stage, settings, sink if ranks.is_rank_zero else _NullSink(), ranks, stop
        )
        try:
            run.setup()
            run.train()
            return run.finish()
        finally:
            run.close()


class _NullSink:
    """The sink of ranks that do not report."""

    def start(self, step: int, total_steps: int) -> None:
        """Do nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _TrainingRun:
    """The run of a stage in one process."""

    def __init__(
        self,
        stage: Stage,
        settings: TrainSettings,
        sink: MetricSink,
        ranks: DistributedContext,
        stop: StopRequest,
    ) -> None:
        self._stage, self._settings, self._sink = stage, settings, sink
        self._ranks, self._stop = ranks, stop
        self._state = TrainState()
        self._optimizer = make_optimizer(stage.model, settings)
        self._config = describe_run(stage, settings, ranks.world_size)
        self._saver = Saver(stage, settings, ranks, self._config)
        num_batches = stage.source.num_batches(0)
        self._warmup_steps = settings.resolve_warmup(num_batches, ranks.world_size)
        self._batches_per_update = settings.accumulation_steps * ranks.world_size
        self._metric_names: list[str] | None = None
        self._stopped_by: int | None = None
        self._tokens_since, self._seconds_since = 0, 0.0
        # RNG state after the last update; an unfinished update may have advanced the generators.
        self._rng = capture_rng()
        self._is_mid_step = False
        # True if all ranks know about a failure, so that they stop at the same step.
        self._is_failure_shared = False

    def setup(self) -> None:
        """Initialize a new run, or restore one from a checkpoint."""
        settings, ranks = self._settings, self._ranks
        if not self._stage.source.num_batches(0):
            raise InvalidInput(f"stage {self._stage.name} has no data to train on")
        seed_everything(settings.seed, ranks.rank)
        self._restore()
        ranks.broadcast_weights(list(named_weights(self._stage.model).values()))
        state, source = self._state, self._stage.source
        left = count_updates(
            state.position, settings.epochs, source.num_batches, self._batches_per_update
        )
        total = state.global_step + left
        state.total_steps = min(total, settings.max_steps) if settings.max_steps else total
        state.world_size = ranks.world_size
        self._rng = capture_rng()
        self._sink.start(state.global_step, state.total_steps)
        self._stage.model.train()
        if state.global_step < state.total_steps:
            self._evaluate_if_due()

    def _restore(self) -> None:
        root = self._settings.checkpoint_root
        path = self._ranks.run_on_rank_zero(self._prepare)
        if path is None:
            return
        target = RestoreTarget(
            model=self._stage.model,
            optimizer=self._optimizer,
            config=self._config,
            rank=self._ranks.rank,
            allow_partial=self._settings.allow_partial,
        )
        self._state = restore(path, target)
        if path.parent.resolve() == root.resolve():
            self._saver.saved_step = self._state.global_step

    def _prepare(self) -> Path | None:
        self._saver.prepare()
        root, resume = self._settings.checkpoint_root, self._settings.resume
        path = choose_checkpoint(root, resume)
        if path is not None and is_rewind(root, resume):
            self._saver.rewind_to(path)
        return path

    def train(self) -> None:
        """Run updates until training is complete or a stop is requested."""
        try:
            while self._stopped_by is None and not self._is_finished:
                self._update()
        except CheckpointError:
            raise
        except Exception as error:  # whatever failed, finished updates are saved first
            if self._can_rescue(error):
                self._saver.save_on_error(self._state, self._optimizer, self._rng)
            raise

    def _can_rescue(self, error: Exception) -> bool:
        """Return True if there are finished updates and all ranks can save them together."""
        # All ranks see the same sums, so all of them raise NonFiniteGradient.
        is_collective = self._is_failure_shared or isinstance(error, NonFiniteGradient)
        has_progress = not self._is_mid_step and self._state.global_step > 0
        return has_progress and (self._ranks.is_single_process or is_collective)

    @property
    def _is_finished(self) -> bool:
        return self._state.global_step >= self._state.total_steps

    def _update(self) -> None:
        state, started = self._state, time.monotonic()
        num_batches = self._stage.source.num_batches(state.epoch)
        window = next_window(state.position, num_batches, self._batches_per_update)
        local_sums = self._accumulate(window)
        if local_sums is None:
            self._optimizer.zero_grad()
            self._stopped_by = self._stop.signal
            return
        total, is_overdue = self._sum_over_ranks(local_sums)
        norm = self._step(total)
        state.epoch, state.step_in_epoch = window.after.epoch, window.after.index
        self._count(total, time.monotonic() - started)
        self._log(total, norm)
        is_best = self._evaluate_if_due()
        self._saver.save_if_due(state, self._optimizer, self._rng, is_overdue or is_best)

    def _accumulate(self, window: UpdateWindow) -> UpdateSums | None:
        try:
            return accumulate(self._stage, window, self._ranks, self._stop.is_requested)
        except Exception:  # whatever failed, the other ranks must learn of it
            if not self._ranks.is_single_process:
                # The other ranks would wait forever for the sums of this rank.
                self._sum_over_ranks(UpdateSums(), is_failing=True)
            raise

    def _sum_over_ranks(
        self, sums: UpdateSums, is_failing: bool = False
    ) -> tuple[UpdateSums, bool]:
        """Sum over all ranks, and agree on a stop, a save and a failure."""
        if self._metric_names is None:
            all_names = self._ranks.all_gather(list(sums.metrics))
            self._metric_names = next((names for names in all_names if names), [])
        stop_flags = [float(self._stop.signal == number) for number in STOP_SIGNALS]
        saving = [float(self._saver.is_overdue), float(self._saver.has_failed)]
        flags = [*stop_flags, *saving, float(is_failing)]
        total, (*stop_flags, is_overdue, has_failed, num_failing) = sum_over_ranks(
            sums, self._metric_names, flags, self._ranks
        )
        if has_failed:
            self._saver.raise_failure()
        self._is_failure_shared = bool(num_failing)
        if num_failing and not is_failing:
            raise RankFailed
        self._record_stop(stop_flags)
        return total, bool(is_overdue)

    def _record_stop(self, counts: list[float]) -> None:
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count and self._stopped_by is None:
                self._stopped_by = number

    def _step(self, total: UpdateSums) -> float:
        norm = 0.0
        check_loss(total.loss, self._state.global_step)
        self._saver.wait_for_copy()
        self._optimizer.set_lr_factor(
            self._settings.lr_factor(
                self._state.global_step, self._state.total_steps, self._warmup_steps
            )
        )
        if total.weight:
            params = self._optimizer.parameters
            self._ranks.all_reduce_gradients(params)
            norm = scale_gradients(params, total.weight, self._settings.grad_clip)
            self._is_mid_step = True
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._rng = capture_rng()
        self._state.global_step += 1
        return norm

    def _count(self, total: UpdateSums, seconds: float) -> None:
        state = self._state
        state.tokens += round(total.tokens)
        state.samples += round(total.samples)
        state.seconds += seconds
        self._tokens_since += round(total.tokens)
        self._seconds_since += seconds
        self._is_mid_step = False

    def _log(self, total: UpdateSums, norm: float) -> None:
        state = self._state
        if state.global_step % self._settings.log_interval and not self._is_finished:
            return
        values = {
            **total.means,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "epoch": state.epoch,
            "tokens": state.tokens,
            "tokens_per_second": self._tokens_since / max(self._seconds_since, 1e-9),
        }
        self._tokens_since, self._seconds_since = 0, 0.0
        self._sink.log(state.global_step, values)

    def _evaluate_if_due(self) -> bool:
        """Evaluate if due; returns True if the weights are the best so far."""
        state = self._state
        is_due = self._settings.is_evaluation_due(state.global_step)
        if not is_due or state.evaluated_step == state.global_step:
            return False
        return self._evaluate()

    def _evaluate(self) -> bool:
        try:
            values = self._ranks.run_on_rank_zero(self._run_evaluation)
        except Exception as error:
            # All ranks know that rank 0 failed, so they can save together.
            self._is_failure_shared = self._ranks.is_rank_zero or isinstance(error, RankFailed)
            raise
        stop_flags = [float(self._stop.signal == number) for number in STOP_SIGNALS]
        self._record_stop(self._ranks.all_reduce_values(stop_flags))
        if values is None:
            return False
        self._sink.log(
            self._state.global_step, {f"eval_{name}": value for name, value in values.items()}
        )
        return self._state.record_evaluation(values)

    def _run_evaluation(self) -> dict[str, float] | None:
        """Evaluate without changing the RNG state; returns None if a signal arrived."""
        rng = capture_rng()
        values = self._stop.run_interruptible(self._stage.evaluate)
        restore_rng(rng)
        self._stage.model.train()
        return None if values is None else dict(values)

    def finish(self) -> TrainResult:
        """Save, and if training is complete, evaluate and export."""
        if self._state.global_step:
            self._saver.save(self._state, self._optimizer, self._rng)
        if self._stopped_by is None:
            self._complete()
        state = self._state
        is_complete = self._stopped_by is None
        return TrainResult(
            stage=self._stage.name,
            steps=state.global_step,
            tokens=state.tokens,
            samples=state.samples,
            seconds=state.seconds,
            before=state.before,
            after=state.held_out if is_complete else {},
            stopped_by=self._stopped_by,
            checkpoint=self._saver.wait(),
        )

    def _complete(self) -> None:
        state = self._state
        if state.evaluated_step != state.global_step:
            self._evaluate()
            if self._stopped_by is None and state.global_step:
                # Save again with the metrics, so that a resumed run need not evaluate again.
                self._saver.save(state, self._optimizer, self._rng, overwrite=True)
        if self._stopped_by is None:
            self._ranks.run_on_rank_zero(self._export)

    def _export(self) -> None:
        self._saver.finish()
        self._stage.export(self._settings.out_dir / EXPORT_NAME)

    def close(self) -> None:
        """Close the sink and wait for the checkpoint writer."""
        try:
            self._sink.close()
        finally:
            self._saver.close()
