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
    if bench.engine.has_adapter(task.run.id):
        return failed
    # Without its first operation there is no model.
    effects = (set_run_state(task.run.id, RunState.FAILED),)
    return Failed(message=failed.message, category=failed.category, effects=effects)


class PassTurn:
    """Passes of one or more models that are computed together, step by step."""

    def __init__(self, bench: Bench, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._read = [_read(task) for task in tasks]
        passes = [item for item in self._read if isinstance(item, Pass)]
        self._run = bench.engine.start_passes(passes)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed, without the last step."""
        return self._run.num_tokens

    def step(self) -> list[Outcome] | None:
        """Compute one micro-batch; returns the outcome of each task after the last one."""
        try:
            results = self._run.step()
        except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
            failed = failure_of(error, "the pass")
            return [failed if isinstance(item, Pass) else item for item in self._read]
        if results is None:
            return None
        rest = iter(results)
        return [
            training.pass_outcome(task, item, next(rest)) if isinstance(item, Pass) else item
            for task, item in zip(self._tasks, self._read, strict=True)
        ]

    def finish(self) -> list[Outcome]:
        """Compute all that is left."""
        while (outcomes := self.step()) is None:
            pass
        return outcomes

    def cancel(self) -> None:
        """Stop here; no pass takes effect."""
        self._run.cancel()


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
    (outcome,) = PassTurn(bench, [task]).finish()
    if isinstance(outcome, Failed):
        raise InvalidInput(outcome.message)
