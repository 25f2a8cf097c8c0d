"""Does work: one operation, or several passes together; a failure never stops the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from tinkex.engine.protocol import Pass, StepRefused
from tinkex.errors import InvalidInput, RequestErrorCategory, StoreError
from tinkex.jobs import saving, training
from tinkex.jobs.bench import Bench, Task
from tinkex.jobs.effects import set_run_state
from tinkex.jobs.kinds import Kind
from tinkex.jobs.outcomes import Done, Failed, Outcome, failure_of
from tinkex.store.records import RunState

Operation: TypeAlias = Callable[[Bench, Task], Done]

OPERATIONS: Mapping[str, Operation] = {
    Kind.CREATE_MODEL: training.create,
    Kind.LOAD_WEIGHTS: training.load,
    Kind.OPTIM_STEP: training.optim_step,
    Kind.UNLOAD_MODEL: training.unload,
    Kind.SAVE_WEIGHTS: saving.save,
    Kind.SAVE_WEIGHTS_FOR_SAMPLER: saving.save_for_sampler,
    Kind.SAVE_WEIGHTS_EXTERNAL: saving.save_external,
}
NO_CUSTOM_LOSS = Failed(
    message="this server does not run uploaded losses; forward_backward_custom computes them in "
    "the client, and works here",
    category=RequestErrorCategory.User,
)


def run_operation(bench: Bench, task: Task) -> Outcome:
    """Do one piece of work that is not a pass."""
    try:
        return OPERATIONS[task.job.kind](bench, task)
    except StoreError:
        # The work is not to blame: it is done again when the worker begins again.
        raise
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        failed = failure_of(error, task.job.kind)
    if bench.engine.has(task.run.id):
        return failed
    # Without its first operation there is no model.
    effects = (set_run_state(task.run.id, RunState.FAILED),)
    return Failed(message=failed.message, category=failed.category, effects=effects)


def run_passes(bench: Bench, tasks: Sequence[Task]) -> list[Outcome]:
    """Run passes of one or more models together; each has its own outcome."""
    read = [_read(task) for task in tasks]
    passes = [item for item in read if isinstance(item, Pass)]
    try:
        results = iter(bench.engine.run_passes(passes))
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        failed = failure_of(error, "the pass")
        return [failed if isinstance(item, Pass) else item for item in read]
    return [
        training.pass_outcome(task, item, next(results)) if isinstance(item, Pass) else item
        for task, item in zip(tasks, read, strict=True)
    ]


def _read(task: Task) -> Pass | Failed:
    try:
        return training.read_pass(task)
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        return failure_of(error, task.job.kind)


def replay(bench: Bench, task: Task) -> None:
    """Do again what changed a model; raises if that cannot be done again."""
    if task.job.kind != Kind.FORWARD_BACKWARD:
        # A step that was refused is refused again, with the same effect.
        with suppress(StepRefused):
            OPERATIONS[task.job.kind](bench, task)
        return
    (outcome,) = run_passes(bench, [task])
    if isinstance(outcome, Failed):
        raise InvalidInput(outcome.message)
