"""Work that changes a model, or computes on it: how a request becomes the engine's verb."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from tinkex import types
from tinkex.engine.protocol import AdapterSpec, EngineFailure, Pass
from tinkex.jobs import payloads
from tinkex.jobs.bench import Bench, Task
from tinkex.jobs.effects import count_usage, set_run_state
from tinkex.jobs.kinds import Kind
from tinkex.jobs.outcomes import TOTAL_WEIGHT, Done, Failed, Outcome
from tinkex.store.records import Run, RunState
from tinkex.types.base import learned
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import encode_forward_backward_output


def spec_of(run: Run) -> AdapterSpec:
    """How a model's adapter is made."""
    return msgspec.convert(run.spec, learned(AdapterSpec))


# --- passes ------------------------------------------------------------------------------------
def read_pass(task: Task) -> Pass:
    """A pass as the engine takes it; raises if the payload is none."""
    is_forward_only = task.job.kind == Kind.FORWARD
    work = payloads.read_pass(
        task.payload, is_proto=task.job.is_proto, is_forward_only=is_forward_only
    )
    return Pass(adapter_id=task.run.id, request=work, is_forward_only=is_forward_only)


def pass_outcome(
    task: Task, asked: Pass, result: types.ForwardBackwardOutput | EngineFailure
) -> Outcome:
    """What the engine said about one pass."""
    if isinstance(result, EngineFailure):
        return Failed(message=result.message, category=result.category)
    run = task.run
    num_tokens = sum(datum.model_input.length for datum in asked.request.data)
    counted = count_usage(
        task.job, run_id=run.id, base_model=run.base_model, kind="training", amount=num_tokens
    )
    return Done(
        result=encode_forward_backward_output(result),
        is_change=not asked.is_forward_only,
        num_tokens=num_tokens,
        metrics=dict(result.metrics) | _total_weight(asked.request.data),
        effects=(counted,),
    )


def _total_weight(data: Sequence[types.Datum]) -> dict[str, float]:
    """What a loss is divided by to compare steps; nothing if it does not weigh its tokens."""
    weights = [datum.loss_fn_inputs.get("weights") for datum in data]
    if all(one is None for one in weights):
        return {}
    # An example without weights counts every target once.
    totals = (
        math.prod(datum.loss_fn_inputs["target_tokens"].shape)
        if one is None
        else abs(one.array).sum()
        for datum, one in zip(data, weights, strict=True)
    )
    return {TOTAL_WEIGHT: float(sum(totals))}


# --- other operations ----------------------------------------------------------------------------
def create(bench: Bench, task: Task) -> Done:
    """Make a model."""
    run = task.run
    bench.engine.create(run.id, spec_of(run))
    return Done(
        result=encode_json(types.CreateModelResponse(model_id=run.id)),
        is_change=True,
        effects=(set_run_state(run.id, RunState.READY),),
    )


def load(bench: Bench, task: Task) -> Done:
    """Load weights into a model; as a model's first operation, make it of them."""
    run, engine = task.run, bench.engine
    request = payloads.read(task.payload, payloads.LoadPayload)
    directory = bench.home.checkpoint(request.checkpoint_id)
    bench.verified.verify(directory, request.path)
    is_first = not engine.has_adapter(run.id)
    if is_first:
        engine.create(run.id, spec_of(run))
    try:
        engine.load(run.id, directory, with_optimizer=request.with_optimizer)
    except Exception:
        if is_first:
            engine.drop(run.id)
        raise
    reply = types.LoadWeightsResponse(path=request.path, model_id=run.id, type="load_weights")
    effects = (set_run_state(run.id, RunState.READY),) if is_first else ()
    return Done(result=encode_json(reply), is_change=True, effects=effects)


def optim_step(bench: Bench, task: Task) -> Done:
    """Take an optimizer step."""
    request = payloads.read(task.payload, types.OptimStepRequest)
    metrics: Mapping[str, float] = bench.engine.optim_step(task.run.id, request.optim_params)
    # JSON has no NaN, and clients refuse what would stand there instead.
    told = {name: value for name, value in metrics.items() if math.isfinite(value)}
    reply = types.OptimStepResponse(metrics=told)
    return Done(result=encode_json(reply), is_change=True, metrics=metrics)


def unload(bench: Bench, task: Task) -> Done:
    """Forget a model's live state; its checkpoints stay."""
    run = task.run
    bench.engine.drop(run.id)
    reply = types.UnloadModelResponse(model_id=run.id, type="unload_model")
    return Done(result=encode_json(reply), effects=(set_run_state(run.id, RunState.UNLOADED),))
