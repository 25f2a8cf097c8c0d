"""Training endpoints: create models, submit passes and optimizer steps, describe, unload."""

from __future__ import annotations

from tinkex import types
from tinkex.engine.custom_losses.graphs import make_loss_id
from tinkex.engine.protocol import check_step_params
from tinkex.errors import InvalidInput
from tinkex.jobs.job_types import JobKind
from tinkex.server.http.model_specs import (
    find_base_model,
    find_model,
    insert_run,
    list_served_models,
    require_trainable_model,
    spec_for_create,
)
from tinkex.server.http.ownership import require_open_session, require_run, require_trainable_run
from tinkex.server.http.request_context import Handler, RequestContext, Services, run_in_thread
from tinkex.server.http.store_access import read
from tinkex.server.http.submission import (
    build_model_id,
    job_key,
    skip_sequence_number,
    submit_job,
    submit_operation,
    submit_pass,
)
from tinkex.server.http.validation import check_custom_losses, check_number, check_pass
from tinkex.store.database import Connection
from tinkex.store.records import NewJob


async def create_model(
    services: Services, context: RequestContext[types.CreateModelRequest]
) -> types.UntypedAPIFuture:
    """Submit the creation of a model; idempotent for the same session and number."""
    request, tenant_id = context.request, context.tenant_id
    check_number("model_seq_id", request.model_seq_id)
    spec = spec_for_create(request, services.config.shards_per_model)
    run_id = build_model_id(request.session_id, request.model_seq_id)

    def prepare(db: Connection) -> None:
        session = require_open_session(db, tenant_id, request.session_id)
        require_trainable_model(db, spec.base_model)
        group_id = services.queue.place_run(db, run_id, spec.base_model)
        insert_run(db, session, run_id, spec, request.user_metadata, group_id=group_id)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=request.session_id,
        kind=JobKind.CREATE_MODEL,
        key=job_key("model", tenant_id, request.session_id, request.model_seq_id),
        run_id=run_id,
        position=0,
        payload=context.body,
    )
    return await submit_job(services, new, prepare)


async def forward_backward(
    services: Services, context: RequestContext[types.ForwardBackwardRequest | types.ForwardRequest]
) -> types.UntypedAPIFuture:
    """Submit a forward_backward pass, or a forward pass if the message requests it."""
    # In protobuf, an absent number is decoded as 0.
    return await _submit_pass(services, context, context.request.seq_id or None)


async def forward(
    services: Services, context: RequestContext[types.ForwardRequest]
) -> types.UntypedAPIFuture:
    """Submit a forward pass, in the form of older clients."""
    return await _submit_pass(services, context, context.request.seq_id)


async def _submit_pass(
    services: Services,
    context: RequestContext[types.ForwardBackwardRequest | types.ForwardRequest],
    seq_id: int | None,
) -> types.UntypedAPIFuture:
    request, model_id = context.request, context.request.model_id
    if isinstance(request, types.ForwardRequest):
        kind, batch = JobKind.FORWARD, request.forward_input
    else:
        kind, batch = JobKind.FORWARD_BACKWARD, request.forward_backward_input

    def find(db: Connection) -> str:
        return require_trainable_run(db, context.tenant_id, model_id).base_model

    model = await find_base_model(services, (context.tenant_id, model_id), find)
    try:
        num_tokens = await check_pass(services, batch, model)
    except InvalidInput:
        await skip_sequence_number(services, context, kind, model_id, seq_id)
        raise
    return await submit_pass(services, context, kind, model_id, seq_id, num_tokens)


async def optim_step(
    services: Services, context: RequestContext[types.OptimStepRequest]
) -> types.UntypedAPIFuture:
    """Submit an optimizer step, whose parameters must be of the model's optimizer."""
    request = context.request
    return await submit_operation(
        services,
        context,
        JobKind.OPTIM_STEP,
        request.model_id,
        request.seq_id,
        extra_prepare=lambda _, run: check_step_params(run.spec["optimizer"], request.optim_params),
    )


async def create_custom_loss(
    services: Services, context: RequestContext[types.CreateCustomLossRequest]
) -> types.UntypedAPIFuture:
    """Submit a custom loss of a session; a graph that cannot be run is rejected now."""
    request, tenant_id = context.request, context.tenant_id
    check_number("custom_loss_seq_id", request.custom_loss_seq_id)
    check_custom_losses(services)
    await run_in_thread(make_loss_id, request.inputs, request.graph)

    def prepare(db: Connection) -> None:
        require_open_session(db, tenant_id, request.session_id)

    new = NewJob(
        id="",
        tenant_id=tenant_id,
        session_id=request.session_id,
        kind=JobKind.CREATE_CUSTOM_LOSS,
        key=job_key("loss", tenant_id, request.session_id, request.custom_loss_seq_id),
        payload=context.body,
    )
    return await submit_job(services, new, prepare)


async def get_info(
    services: Services, context: RequestContext[types.GetInfoRequest]
) -> types.GetInfoResponse:
    """Describe a model."""

    def query(db: Connection) -> types.GetInfoResponse:
        run = require_run(db, context.tenant_id, context.request.model_id)
        base = find_model(list_served_models(db), run.base_model)
        name = run.base_model
        return types.GetInfoResponse(
            type="get_info",
            model_id=run.id,
            model_data=types.ModelData(
                arch=base.arch if base is not None else None,
                model_name=name,
                tokenizer_id=(base.tokenizer_id if base is not None else None) or name,
            ),
            optimizer_config=run.spec["optimizer"],
            is_lora=True,
            lora_rank=run.spec["rank"],
            model_name=name,
        )

    return await read(services, query)


async def unload_model(
    services: Services, context: RequestContext[types.UnloadModelRequest]
) -> types.UntypedAPIFuture:
    """Submit the unloading of a model, after its earlier operations."""
    return await submit_operation(
        services, context, JobKind.UNLOAD_MODEL, context.request.model_id, None
    )


ROUTES: dict[str, Handler] = {
    "create_model": create_model,
    "forward_backward": forward_backward,
    "forward": forward,
    "optim_step": optim_step,
    "create_custom_loss": create_custom_loss,
    "get_info": get_info,
    "unload_model": unload_model,
}
