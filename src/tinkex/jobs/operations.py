"""Operations of the worker: decode a job's request, call the engine, build the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from tinkex import types
from tinkex.checkpoint.places import BlobsUnavailable
from tinkex.engine.custom_losses.graphs import make_loss_id
from tinkex.engine.protocol import AdapterSpec, EngineFailure, Pass, StepRefused
from tinkex.errors import InvalidInput
from tinkex.jobs import job_types, save_operations
from tinkex.jobs.job_types import (
    TOTAL_WEIGHT_METRIC,
    WORKER_ERRORS,
    Completed,
    Failed,
    JobKind,
    JobOutcome,
    to_failed,
)
from tinkex.jobs.result_log import count_usage, set_run_state
from tinkex.jobs.worker_context import ModelTask, WorkerContext
from tinkex.store.records import RunRecord, RunState
from tinkex.types.base import preload_type
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import encode_forward_backward_output


def adapter_spec(run: RunRecord) -> AdapterSpec:
    """Return the adapter spec of a model."""
    return msgspec.convert(run.spec, preload_type(AdapterSpec))


# --- passes ------------------------------------------------------------------------------------
def parse_pass(task: ModelTask) -> Pass:
    """Decode the payload of a pass; raises InvalidInput if it is invalid."""
    is_forward_only = task.job.kind == JobKind.FORWARD
    request = job_types.decode_pass_payload(
        task.payload, is_proto=task.job.is_proto, is_forward_only=is_forward_only
    )
    return Pass(adapter_id=task.run.id, request=request, is_forward_only=is_forward_only)


def make_pass_outcome(
    task: ModelTask, request: Pass, result: types.ForwardBackwardOutput | EngineFailure
) -> JobOutcome:
    """Build the outcome of one pass."""
    if isinstance(result, EngineFailure):
        return Failed(message=result.message, category=result.category)
    run = task.run
    num_tokens = sum(datum.model_input.length for datum in request.request.data)
    counted = count_usage(
        task.job, run_id=run.id, base_model=run.base_model, kind="training", amount=num_tokens
    )
    return Completed(
        result=encode_forward_backward_output(result),
        is_model_change=not request.is_forward_only,
        num_tokens=num_tokens,
        metrics=dict(result.metrics) | _total_weight_metric(request.request.data),
        effects=(counted,),
    )


def _total_weight_metric(data: Sequence[types.Datum]) -> dict[str, float]:
    """Return the sum of weights, which normalizes losses of steps; empty without weights."""
    weights = [datum.loss_fn_inputs.get("weights") for datum in data]
    if all(one is None for one in weights):
        return {}
    # An example without weights has weight 1 per target.
    totals = (
        math.prod(datum.loss_fn_inputs["target_tokens"].shape)
        if one is None
        else abs(one.array).sum()
        for datum, one in zip(data, weights, strict=True)
    )
    return {TOTAL_WEIGHT_METRIC: float(sum(totals))}


# --- other operations ----------------------------------------------------------------------------
def create_model(context: WorkerContext, task: ModelTask) -> Completed:
    """Create a model's adapter."""
    run = task.run
    context.engine.create(run.id, adapter_spec(run))
    return Completed(
        result=encode_json(types.CreateModelResponse(model_id=run.id)),
        is_model_change=True,
        effects=(set_run_state(run.id, RunState.READY),),
    )


def load_weights(context: WorkerContext, task: ModelTask) -> Completed:
    """Load weights into a model; as its first operation, create it from them."""
    run, engine = task.run, context.engine
    request = job_types.decode_payload(task.payload, job_types.LoadPayload)
    is_first = not engine.has_adapter(run.id)
    opened = context.storage.open_checkpoint(request.checkpoint_id, request.place, request.path)
    with opened as directory:
        if is_first:
            engine.create(run.id, adapter_spec(run))
        try:
            engine.load(run.id, directory, with_optimizer=request.with_optimizer)
        except Exception:  # undo the creation after any failure
            if is_first:
                engine.drop(run.id)
            raise
    reply = types.LoadWeightsResponse(path=request.path, model_id=run.id, type="load_weights")
    effects = (set_run_state(run.id, RunState.READY),) if is_first else ()
    return Completed(result=encode_json(reply), is_model_change=True, effects=effects)


def optim_step(context: WorkerContext, task: ModelTask) -> Completed:
    """Take an optimizer step."""
    request = job_types.decode_payload(task.payload, types.OptimStepRequest)
    metrics: Mapping[str, float] = context.engine.optim_step(task.run.id, request.optim_params)
    # JSON has no NaN, and clients refuse null.
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    reply = types.OptimStepResponse(metrics=finite)
    return Completed(result=encode_json(reply), is_model_change=True, metrics=metrics)


def unload_model(context: WorkerContext, task: ModelTask) -> Completed:
    """Drop a model's state; its checkpoints stay."""
    run = task.run
    context.engine.drop(run.id)
    reply = types.UnloadModelResponse(model_id=run.id, type="unload_model")
    return Completed(result=encode_json(reply), effects=(set_run_state(run.id, RunState.UNLOADED),))


Operation: TypeAlias = Callable[[WorkerContext, ModelTask], Completed]

OPERATIONS: Mapping[str, Operation] = {
    JobKind.CREATE_MODEL: create_model,
    JobKind.LOAD_WEIGHTS: load_weights,
    JobKind.OPTIM_STEP: optim_step,
    JobKind.UNLOAD_MODEL: unload_model,
    JobKind.SAVE_WEIGHTS: save_operations.save_weights,
    JobKind.SAVE_WEIGHTS_FOR_SAMPLER: save_operations.save_weights_for_sampler,
    JobKind.SAVE_WEIGHTS_EXTERNAL: save_operations.save_weights_external,
}


def create_custom_loss(payload: bytes) -> Completed:
    """Return the id of an uploaded loss, which contains it."""
    request = job_types.decode_payload(payload, types.CreateCustomLossRequest)
    loss_id = make_loss_id(request.inputs, request.graph)
    return Completed(result=encode_json(types.CreateCustomLossResponse(loss_id=loss_id)))


def run_operation(context: WorkerContext, task: ModelTask) -> JobOutcome:
    """Run one operation that is not a pass."""
    try:
        return OPERATIONS[task.job.kind](context, task)
    except (*WORKER_ERRORS, BlobsUnavailable):
        # During an outage of the object store the job runs again later.
        raise
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        failed = to_failed(error, task.job.kind)
    if context.engine.has_adapter(task.run.id):
        return failed
    # Its first operation failed, so the model does not exist.
    effects = (set_run_state(task.run.id, RunState.FAILED),)
    return Failed(message=failed.message, category=failed.category, effects=effects)


class PassBatch:
    """Passes of one or more models that are computed together, one micro-batch per step."""

    def __init__(self, context: WorkerContext, tasks: Sequence[ModelTask]) -> None:
        self._tasks = tasks
        self._parsed = [_try_parse_pass(task) for task in tasks]
        passes = [item for item in self._parsed if isinstance(item, Pass)]
        self._engine_run = context.engine.start_passes(passes)

    @property
    def num_tokens(self) -> int:
        """The number of computed tokens, without the last step."""
        return self._engine_run.num_tokens

    def step(self) -> list[JobOutcome] | None:
        """Compute one micro-batch; returns the outcome of each task after the last one."""
        try:
            results = self._engine_run.step()
        except WORKER_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
            failed = to_failed(error, "the pass")
            return [failed if isinstance(item, Pass) else item for item in self._parsed]
        if results is None:
            return None
        rest = iter(results)
        return [
            make_pass_outcome(task, item, next(rest)) if isinstance(item, Pass) else item
            for task, item in zip(self._tasks, self._parsed, strict=True)
        ]

    def finish(self) -> list[JobOutcome]:
        """Compute the remaining micro-batches."""
        while (outcomes := self.step()) is None:
            pass
        return outcomes

    def cancel(self) -> None:
        """Discard the batch; no pass takes effect."""
        self._engine_run.cancel()


def _try_parse_pass(task: ModelTask) -> Pass | Failed:
    try:
        return parse_pass(task)
    except Exception as error:  # noqa: BLE001 - a failed job must not stop the loop
        return to_failed(error, task.job.kind)


def replay(context: WorkerContext, task: ModelTask) -> None:
    """Repeat an operation that changed a model; raises if it fails."""
    if task.job.kind != JobKind.FORWARD_BACKWARD:
        # A refused step is refused again, with the same effect.
        with suppress(StepRefused):
            OPERATIONS[task.job.kind](context, task)
        return
    (outcome,) = PassBatch(context, [task]).finish()
    if isinstance(outcome, Failed):
        raise InvalidInput(outcome.message)
