"""Does work: one operation, or several passes together; a failure never stops the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from tinkex.engine.protocol import Pass, StepRefused
from tinkex.errors import InvalidInput, RequestErrorCategory, StoreError
from tinkex.jobs import saving, training
from tinkex.jobs.bench import ModelTask, WorkerContext
from tinkex.jobs.effects import set_run_state
from tinkex.jobs.kinds import JobKind
from tinkex.jobs.outcomes import Completed, Failed, JobOutcome, to_failed
from tinkex.store.records import RunState

Operation: TypeAlias = Callable[[WorkerContext, ModelTask], Completed]

OPERATIONS: Mapping[str, Operation] = {
    JobKind.CREATE_MODEL: training.create_model,
    JobKind.LOAD_WEIGHTS: training.load_weights,
    JobKind.OPTIM_STEP: training.optim_step,
    JobKind.UNLOAD_MODEL: training.unload_model,
    JobKind.SAVE_WEIGHTS: saving.save_weights,
    JobKind.SAVE_WEIGHTS_FOR_SAMPLER: saving.save_weights_for_sampler,
    JobKind.SAVE_WEIGHTS_EXTERNAL: saving.save_weights_external,
}
CUSTOM_LOSS_UNSUPPORTED = Failed(
    message="this server does not run uploaded losses; forward_backward_custom computes them in "
    "the client, and works here",
    category=RequestErrorCategory.User,
)


def run_operation(context: WorkerContext, task: ModelTask) -> JobOutcome:
    """Do one piece of work that is not a pass."""
    try:
        return OPERATIONS[task.job.kind](context, task)
    except StoreError:
        # The work is not to blame: it is done again when the worker begins again.
        raise
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        failed = to_failed(error, task.job.kind)
    if context.engine.has_adapter(task.run.id):
        return failed
    # Without its first operation there is no model.
    effects = (set_run_state(task.run.id, RunState.FAILED),)
    return Failed(message=failed.message, category=failed.category, effects=effects)


class PassBatch:
    """Passes of one or more models that are computed together, step by step."""

    def __init__(self, context: WorkerContext, tasks: Sequence[ModelTask]) -> None:
        self._tasks = tasks
        self._parsed = [_try_parse_pass(task) for task in tasks]
        passes = [item for item in self._parsed if isinstance(item, Pass)]
        self._engine_run = context.engine.start_passes(passes)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed, without the last step."""
        return self._engine_run.num_tokens

    def step(self) -> list[JobOutcome] | None:
        """Compute one micro-batch; returns the outcome of each task after the last one."""
        try:
            results = self._engine_run.step()
        except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
            failed = to_failed(error, "the pass")
            return [failed if isinstance(item, Pass) else item for item in self._parsed]
        if results is None:
            return None
        rest = iter(results)
        return [
            training.make_pass_outcome(task, item, next(rest)) if isinstance(item, Pass) else item
            for task, item in zip(self._tasks, self._parsed, strict=True)
        ]

    def finish(self) -> list[JobOutcome]:
        """Compute all that is left."""
        while (outcomes := self.step()) is None:
            pass
        return outcomes

    def cancel(self) -> None:
        """Stop here; no pass takes effect."""
        self._engine_run.cancel()


def _try_parse_pass(task: ModelTask) -> Pass | Failed:
    try:
        return training.parse_pass(task)
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        return to_failed(error, task.job.kind)


def replay(context: WorkerContext, task: ModelTask) -> None:
    """Do again what changed a model; raises if that cannot be done again."""
    if task.job.kind != JobKind.FORWARD_BACKWARD:
        # A step that was refused is refused again, with the same effect.
        with suppress(StepRefused):
            OPERATIONS[task.job.kind](context, task)
        return
    (outcome,) = PassBatch(context, [task]).finish()
    if isinstance(outcome, Failed):
        raise InvalidInput(outcome.message)
